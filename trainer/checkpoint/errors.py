"""Checkpoint errors that a user can act on."""

from trainer.errors import TrainingError


class CheckpointError(TrainingError):
    """A checkpoint cannot be written or read; the message names the file and what to do."""


class StaleAttempt(CheckpointError):
    """A newer attempt at this run has begun: this one must stop."""
