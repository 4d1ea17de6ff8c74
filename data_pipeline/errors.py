"""Exceptions for problems that the user can fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from configs.errors import OptionError, UserError


class DataError(UserError):
    """A problem with text, tokenizer, corpus or data settings; one line that names file or key."""


class EmptyText(DataError):
    """A text of an example has no tokens."""


class BadNumber(DataError):
    """A field that must hold a finite number holds something else, or nothing."""


class BadShard(DataError):
    """A shard is missing, truncated or corrupt. `data.on_bad_shard` says what happens then."""

    def ending_a_job(self) -> BadShard:
        """This fault, with what to do about it."""
        return BadShard(f"{self}; restore it, or set data.on_bad_shard to skip")


_PANIC = "PanicException"  # pyo3's class for a panic in Rust cannot be imported


@contextmanager
def as_data_errors(what: str, also: type[Exception] | None = Exception) -> Iterator[None]:
    """Raise DataError for a Rust panic or an `also` exception; one line, beginning with `what`.

    `tokenizers` raises a bare Exception for data that it rejects. For data that it does not expect
    it panics; a panic derives from BaseException alone.
    """
    try:
        yield
    except (DataError, OptionError):
        raise
    except BaseException as error:
        expected = also is not None and isinstance(error, also)
        if not expected and type(error).__name__ != _PANIC:
            raise
        reason = " ".join(str(error).split())
        raise DataError(f"{what}: {reason[:200]}" if reason else what) from None
