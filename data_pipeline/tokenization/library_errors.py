"""Errors of the libraries that read tokenizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from data_pipeline.errors import DataError

_PANIC = "PanicException"  # of a library in Rust; no class of it can be imported


@contextmanager
def as_data_errors(what: str, also: type[Exception] | None = Exception) -> Iterator[None]:
    """Makes one line of a library's panic, and of exceptions of the class `also`; `what` is first.

    `tokenizers` raises bare Exception where it cannot use data, and panics, which derive from
    BaseException alone, where it did not expect them.
    """
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        expected = also is not None and isinstance(error, also)
        if not expected and type(error).__name__ != _PANIC:
            raise
        reason = " ".join(str(error).split())
        raise DataError(f"{what}: {reason[:200]}" if reason else what) from None
