"""Files of the user's that add to registries: a job's ``plugins``, a command's ``--plugin``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.errors import ConfigError

COPIES = "submissions"  # the folder of a run in which `tandem submit` keeps copies


def import_plugins(paths: Sequence[str]) -> None:
    """Register what is in these files: tasks, terms, optimizers, packings, tokenizers and so on.

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
