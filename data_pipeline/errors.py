"""Exceptions for problems that the user can fix."""


class DataError(ValueError):
    """A problem with text, tokenizer, corpus or data settings; one line that names file or key."""


class EmptyText(DataError):
    """A text of an example has no tokens."""


class BadNumber(DataError):
    """A field that must hold a finite number holds something else, or nothing."""


class BadShard(DataError):
    """A shard is missing, truncated or corrupt. `data.on_bad_shard` says what happens then."""
