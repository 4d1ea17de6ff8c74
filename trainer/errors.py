"""The error for problems that the user can fix."""


class TrainingError(ValueError):
    """A job cannot continue, for a reason that the user can fix; the one-line message says how."""
