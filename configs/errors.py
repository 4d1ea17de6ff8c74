"""The exception of this package."""


class ConfigError(ValueError):
    """A mistake in a config that the user can fix; the message is one line."""
