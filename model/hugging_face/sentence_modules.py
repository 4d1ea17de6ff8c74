"""The modules of a `sentence-transformers` folder: how it makes a text's vector of the states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from model.errors import ModelError

MODULES = "modules.json"
POOLINGS = {"cls": "first", "mean": "mean"}  # their names and ours
_POOLING, _NORMALIZE = "Pooling", "Normalize"
_KNOWN = ("Transformer", _POOLING, _NORMALIZE)
_OLDER = {"cls_token": "cls", "mean_tokens": "mean"}  # keys of `pooling_mode_...`, true or false


def read_vector(folder: Path, read: Callable[[Path], Any]) -> dict[str, Any] | None:
    """`pooling` and `normalise` of a `TaskHeadConfig`; None where the folder has no modules.

    `read` reads a file of JSON. Raises ModelError, one line, for modules of other kinds.
    """
    if not (folder / MODULES).exists():
        return None
    modules = {str(module["type"]).rpartition(".")[2]: module for module in read(folder / MODULES)}
    if unknown := ", ".join(modules.keys() - {*_KNOWN}):
        raise ModelError(
            f"{MODULES}: its vectors go through {unknown}, which is not read here; to use the "
            f"encoder alone, name a copy of the folder without {MODULES}"
        )
    if _POOLING not in modules:
        return None
    file = folder / str(modules[_POOLING]["path"]) / "config.json"
    mode = _mode(read(file))
    if mode not in POOLINGS:
        raise ModelError(f"{file.relative_to(folder)}: pools by {mode}; cls and mean are read here")
    return {"pooling": POOLINGS[mode], "normalise": _NORMALIZE in modules}


def _mode(pooling: Mapping[str, Any]) -> str:
    """The name of the pooling; several are joined by +."""
    if "pooling_mode" in pooling:
        return str(pooling["pooling_mode"])
    prefix = "pooling_mode_"
    chosen = [
        key.removeprefix(prefix) for key in pooling if key.startswith(prefix) and pooling[key]
    ]
    return "+".join(_OLDER.get(key, key) for key in chosen)
