"""Tasks that a model can learn: each is a module here or a Python file of the user's.

A task registers the section of its term (`trainer.objectives.term.register`). Where it needs them,
it brings its own head, target, denominator, metric and data. Importing this package registers the
tasks in it; `load_plugins` adds those of a job.
"""

from collections.abc import Sequence

from configs.kinds import import_modules, import_plugins
from trainer.objectives.objective_config import declare_terms


def load_plugins(paths: Sequence[str]) -> None:
    """Register what is in these files, and make keys of their terms; as `import_plugins`."""
    import_plugins(paths)
    declare_terms()


import_modules(__name__, __path__)
declare_terms()
