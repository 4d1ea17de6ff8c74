"""The exception of this package."""

from configs.errors import UserError


class LaunchError(UserError):
    """A launch failed for a reason that the user can fix; the message is one line."""
