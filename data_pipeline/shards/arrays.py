"""Reading ``.npy`` files that may be damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError


def map_array(path: Path) -> NDArray:
    """The one-dimensional array in a file, memory-mapped and read-only.

    Raises DataError, naming the file, if it is missing or holds anything else.
    """
    try:
        found = _mapped(path)
    except FileNotFoundError:
        raise DataError(f"{path}: missing; build the corpus again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # any exception: the header is parsed as a Python literal
        raise DataError(f"{path}: not an array: {' '.join(str(error).split())[:200]}") from None
    if found.ndim != 1:
        raise DataError(f"{path}: has {found.ndim} dimensions instead of one; build again")
    return found


def _mapped(path: Path) -> NDArray:
    """What `np.load` does with a memory map, but opens the file once and not three times.

    Where thousands of ranks start, each open is a request to the file system.
    """
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version} of the format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        return np.memmap(file, dtype, "r", file.tell(), shape)
