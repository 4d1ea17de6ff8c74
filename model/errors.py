"""The exception of this package."""


class ModelError(ValueError):
    """A problem with a model or its files that the user can fix; the message is one line."""
