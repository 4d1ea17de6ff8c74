"""The exception of this package."""

from configs.errors import UserError


class ModelError(UserError):
    """A problem with a model or its files that the user can fix; the message is one line."""
