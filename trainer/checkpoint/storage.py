"""Durable files: written once, hashed while written, fsynced before use."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CHUNK = 16 * 2**20  # bytes hashed and written at a time; both release the GIL
_SAFETENSORS = {  # the format's names of dtypes
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class StoredFile:
    """A written file: its path relative to the checkpoint, its size and the sha256 of its bytes."""

    path: str
    bytes: int
    sha256: str


def write_durably(folder: Path, path: str, chunks: Iterable[bytes | memoryview]) -> StoredFile:
    """Write ``chunks`` to a new file ``folder/path`` and fsync it.

    Raises:
        OSError: with the path, whichever call failed.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with open(folder / path, "xb", buffering=0) as file:
            for chunk in chunks:
                digest.update(chunk)
                size += _write_all(file, memoryview(chunk))
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder / path)) from None
    return StoredFile(path, size, digest.hexdigest())


def _write_all(file: FileIO, data: memoryview) -> int:
    """Write all bytes to an unbuffered file, whose `write` may take only a part."""
    rest = data
    while rest.nbytes:
        rest = rest[file.write(rest) :]
    return data.nbytes


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file, and fsync the copy."""
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


def write_json(folder: Path, path: str, content: Any) -> StoredFile:
    """Write ``content`` as JSON, durably."""
    return write_durably(folder, path, [json.dumps(content).encode()])


def safetensors_chunks(header: bytes, data: Tensor) -> Iterable[bytes | memoryview]:
    """A safetensors file, from its header and data (uint8 [bytes]), as `write_durably` takes it."""
    yield header
    view = data.numpy()
    for at in range(0, len(view), _CHUNK):
        yield view[at : at + _CHUNK].data


def safetensors_header(tensors: Mapping[str, tuple[torch.dtype, int]]) -> bytes:
    """The header for flat tensors ``{name: (dtype, elements)}`` stored back to back in this order.

    The format: 8 bytes of little-endian length, then JSON padded with spaces to 8 bytes
    (https://github.com/huggingface/safetensors#format).
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, numel) in tensors.items():
        end = at + numel * dtype.itemsize
        entries[name] = {
            "dtype": _SAFETENSORS[dtype],
            "shape": [numel],
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
