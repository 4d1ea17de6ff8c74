"""The one exception of this package."""


class ConfigError(ValueError):
    """Something in a configuration that its author can fix; the message is one line."""
