"""The exception of this package."""


class ModelError(ValueError):
    """Something about a model or its files that the user can fix; the message is one line."""
