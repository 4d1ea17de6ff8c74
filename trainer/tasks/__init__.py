"""Tasks that a model can learn: each is a module here or a Python file of the user's.

A task registers the section of its term (`trainer.objectives.term.register`). Where it needs them,
it brings its own head, target, denominator, metric and data. Importing this package registers the
tasks in it; `load_plugins` adds those of a job.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from configs import ConfigError
from trainer.objectives.objective_config import declare_terms

COPIES = "submissions"  # the folder of a run in which `tandem submit` keeps copies


def load_plugins(paths: Sequence[str]) -> None:
    """Register the tasks, terms, optimizers, schedules, packings and so on in these files.

    Each is imported once per process.

    Raises ConfigError, naming the file, where one does not exist or cannot be imported.
    """
    names: list[str] = []
    for path in map(Path, paths):
        names.append(path.stem)
        same = names.count(path.stem)  # plugins of one name are told apart by their order
        name = f"tandem_plugin{same if same > 1 else ''}_{path.stem}"
        if name in sys.modules and _is_same(Path(str(sys.modules[name].__file__)), path.resolve()):
            continue
        if not path.is_file():
            raise ConfigError(f"plugins: {path}: no such file")
        _import_file(name, path.resolve())
    declare_terms()


def _is_same(loaded: Path, path: Path) -> bool:
    """Whether a plugin that is loaded stands for this file: it, or another start's copy of it."""
    return loaded == path or COPIES in loaded.parts or COPIES in path.parts


def _import_file(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugins: {path}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code may raise anything
        del sys.modules[name]
        raise ConfigError(f"plugins: {path}: {type(error).__name__}: {error}") from error


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
declare_terms()
