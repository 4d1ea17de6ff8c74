"""The error for what a user can fix."""


class TrainingError(ValueError):
    """A job cannot go on for a reason its user can fix; the message is one line that says how."""
