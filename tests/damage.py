"""Every way in which one file can come to harm, for tests that must notice each of them.

`damages(data)` yields what the file may hold afterwards, and `harmed(path, damage)` is the file in
that state until the block ends::

    for damage in damages(path.read_bytes()):
        with harmed(path, damage):
            assert path.name in message_of_what_reads_it()
"""

from __future__ import annotations

import copy
import functools
import io
import json
import math
import os
import random
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FLIPS = 6


@dataclass(frozen=True)
class Damage:
    """What became of a file: other `content`, a folder of its name, or nothing at all."""

    name: str
    content: bytes | None = None
    is_folder: bool = False

    def inflict(self, path: Path) -> None:
        """Do this to the file at `path`."""
        path.unlink()
        if self.is_folder:
            path.mkdir()
        elif self.content is not None:
            path.write_bytes(self.content)


def damages(data: bytes, flips: int = FLIPS, seed: int = 0) -> Iterator[Damage]:
    """A file of `data` cut, extended, with single bits flipped, replaced by another kind, gone."""
    yield Damage("missing")
    yield Damage("a folder", is_folder=True)
    changed = [*_cut(data), *_flipped(data, flips, seed), *_replaced(data)]
    yield from (damage for damage in changed if damage.content != data)


NESTED: Any = functools.reduce(lambda inner, _: [inner], range(500), [])  # Python reads it
WRONG: tuple[Any, ...] = (
    None, True, -1, 0.5, 10**30, 10**400, math.nan, math.inf, "text", "", [], {}, [[]], {"a": {}},
    NESTED,
)  # fmt: skip


def edits(data: bytes) -> Iterator[Damage]:
    """A JSON file in which one value, at any depth, has another type or size, or is gone."""
    tree = json.loads(data)
    for path in _places(tree):
        where = "/".join(map(str, path))
        for value in WRONG:
            changed = json.dumps(_edited(tree, path, value)).encode()
            yield Damage(f"{where} is {str(value)[:40]}", changed)
        if path:
            yield Damage(f"{where} is gone", json.dumps(_edited(tree, path)).encode())


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = enumerate(tree) if isinstance(tree, list) else ()
    for key, value in tree.items() if isinstance(tree, dict) else items:
        yield from _places(value, (*path, key))


def _edited(tree: Any, path: tuple[Any, ...], *value: Any) -> Any:
    """The tree with another `value` at this path, or without it."""
    if not path:
        return value[0]
    changed, key = copy.copy(tree), path[0]
    if len(path) == 1 and not value:
        del changed[key]
    else:
        changed[key] = _edited(tree[key], path[1:], *value)
    return changed


@contextmanager
def harmed(path: Path, damage: Damage) -> Iterator[None]:
    """The file at `path` in the state of `damage`; as it was, times included, when this ends."""
    content, before = path.read_bytes(), path.stat()
    damage.inflict(path)
    try:
        yield
    finally:
        if damage.is_folder and path.is_dir():
            path.rmdir()
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _cut(data: bytes) -> Iterator[Damage]:
    yield Damage("empty", b"")
    for name, size in (("cut in half", len(data) // 2), ("short of a byte", len(data) - 1)):
        yield Damage(name, data[: max(size, 0)])
    yield Damage("cut behind its first bytes", data[:9])
    yield Damage("a byte longer", data + b"\0")


def _flipped(data: bytes, flips: int, seed: int) -> Iterator[Damage]:
    """The first and the last byte, and `flips` places between."""
    draw = random.Random(seed)
    places = {0, len(data) - 1, *(draw.randrange(len(data)) for _ in range(flips))} if data else ()
    for place in sorted(places):
        bit = draw.randrange(8)
        changed = bytearray(data)
        changed[place] ^= 1 << bit
        yield Damage(f"bit {bit} of byte {place} flipped", bytes(changed))


def _replaced(data: bytes) -> Iterator[Damage]:
    yield Damage("zeros of its size", bytes(len(data)))
    yield Damage("noise of its size", random.Random(len(data)).randbytes(len(data)))
    for tree in ([], {}, None, 7, "text", [{"format": 1}]):
        yield Damage(f"JSON: {tree!r}", json.dumps(tree).encode())
    yield Damage("deep JSON", b"[" * 20_000)
    yield Damage("not UTF-8", b'{"a": "\xff\xfe"}')
    yield Damage("prose", "Not what it was: ü\n".encode() * 20)
    for array in (np.zeros(0), np.arange(5.0), np.array({"a": 1}, object)):
        yield Damage(f"npy of {array.dtype} {array.shape}", _saved(np.save, array))
    yield Damage("npz", _saved(np.savez, np.arange(3)))
    yield Damage("zip", _zipped())
    yield Damage("tar", _tarred())


def _saved(save: Callable[[io.BytesIO, np.ndarray], None], array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    save(stream, array)
    return stream.getvalue()


def _zipped() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("inside.txt", "text")
    return stream.getvalue()


def _tarred() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as file:
        file.addfile(tarfile.TarInfo("inside.txt"))
    return stream.getvalue()
