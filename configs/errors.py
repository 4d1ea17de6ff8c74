"""The base of all exceptions for problems that the user can fix, and those of this package."""


class UserError(ValueError):
    """A problem that the user can fix; the message is one line."""

    exit_code = 1


class OptionError(UserError):
    """An option of the command line has a value that cannot be; the message begins with it."""

    exit_code = 2


class ConfigError(UserError):
    """A mistake in a config that the user can fix; the message is one line."""


class OverrideError(ConfigError):
    """A word of the command line that should be ``key=value`` and is not."""

    exit_code = OptionError.exit_code
