"""What a model can learn: each task is a module here, or in a file of the user's own.

A task brings the section of its term (`trainer.objectives.term.register`) and, as far as it needs
its own, head, target, denominator, metric and data. Importing this package finds those that are in
it; `load_plugins` adds a job's.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from configs import ConfigError
from trainer.objectives.objective import declare_terms


def load_plugins(paths: Sequence[str]) -> None:
    """Find the tasks in these Python files, each once in a process.

    Raises ConfigError, which names the file, for one that is not there or does not import.
    """
    for path in map(Path, paths):
        name = f"tandem_plugin_{path.stem}"
        if name in sys.modules and sys.modules[name].__file__ == str(path.resolve()):
            continue
        if not path.is_file():
            raise ConfigError(f"plugins: {path}: no such file")
        _import_file(name, path.resolve())
    declare_terms()


def _import_file(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugins: {path}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code, which may raise anything
        del sys.modules[name]
        raise ConfigError(f"plugins: {path}: {type(error).__name__}: {error}") from error


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
declare_terms()
