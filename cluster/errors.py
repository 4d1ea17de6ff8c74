"""The exception of this package."""


class LaunchError(ValueError):
    """A launch failed for a reason that the user can fix; the message is one line."""
