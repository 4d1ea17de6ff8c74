"""Errors for problems that the user can fix."""

from configs.errors import UserError


class TrainingError(UserError):
    """A job cannot continue, for a reason that the user can fix; the one-line message says how."""


class CheckpointError(TrainingError):
    """A checkpoint cannot be written or read; the message names the file and what to do."""


class UnreadableCheckpoint(CheckpointError):
    """A file of a checkpoint cannot be read here and now, though it may be intact."""


class StaleAttempt(CheckpointError):
    """A newer attempt at this run has begun: this one must stop."""
