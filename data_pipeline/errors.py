"""The exceptions that this package raises for what a user can fix."""


class DataError(ValueError):
    """A problem with text, tokenizer, corpus or data settings: one line, naming the file or key."""


class BadShard(DataError):
    """A shard that is missing, cut off or not as it was built; `on_bad_shard` decides."""
