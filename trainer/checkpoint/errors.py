"""What can go wrong with a checkpoint that a user can understand and act on."""

from trainer.errors import TrainingError


class CheckpointError(TrainingError):
    """A checkpoint cannot be written or read; the one line names the file and what to do."""


class StaleAttempt(CheckpointError):
    """A newer attempt of this run has begun: this one must stop and has published nothing since."""
