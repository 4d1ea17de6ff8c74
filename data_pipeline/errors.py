"""The one exception that this package raises for what a user can fix."""


class DataError(ValueError):
    """A problem with text, tokenizer, corpus or data settings: one line, naming the file or key."""
