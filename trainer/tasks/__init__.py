"""Tasks that a model can learn: each is a module here or a Python file of the user's.

A task registers the section of its term (`trainer.objectives.term.register`). Where it needs them,
it brings its own head, target, denominator, metric and data. Importing this package registers the
tasks in it; `load_plugins` adds those of a job.
"""

import importlib
import pkgutil
from collections.abc import Sequence

from configs.kinds import import_plugins
from trainer.objectives.objective_config import declare_terms


def load_plugins(paths: Sequence[str]) -> None:
    """Register what is in these files, and make keys of their terms; as `import_plugins`."""
    import_plugins(paths)
    declare_terms()


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
declare_terms()
