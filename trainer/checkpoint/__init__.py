"""Elastic, asynchronous, atomic checkpoints of several DeepSpeed engines.

Weights and optimizer states are stored per parameter, not per rank. So a checkpoint saved on any
number of ranks, at any ZeRO stage, resumes on any other::

    checkpoints/step-000001000/
        manifest.json                        the index of all tensors, checksums, and health
        trainer.json                         step, attempt, scores and their metrics, the state
        metrics.jsonl                        the newest rows of the run's metrics
        teacher/rank-00000.safetensors       fragments named "parameter|state|first element"
        students/NAME/rank-00000.safetensors

A checkpoint becomes visible by one rename, after every file is on disk. A crash at any instant
leaves the previous checkpoint intact. At the start of a job::

    attempt = Attempt.begin(run)                       # rank 0, then broadcast
    checkpoint = newest_intact(run / "checkpoints", log, group)
    writer = CheckpointWriter(run / "checkpoints", Retention(), attempt, log,
                              resumed_from=checkpoint.step if checkpoint else None)
"""

from trainer.checkpoint.attempts import (
    Attempt,
    Owner,
    live_owner,
    owner_has_ended,
    published,
    require_no_owner,
    send_heartbeat,
)
from trainer.checkpoint.carried import branch
from trainer.checkpoint.folder import Ranking, Retention
from trainer.checkpoint.layout import full_state_dict
from trainer.checkpoint.reader import (
    Checkpoint,
    best_intact,
    intact,
    missing,
    newest_intact,
    newest_sound,
    newest_state,
)
from trainer.checkpoint.writer import CheckpointWriter
from trainer.errors import CheckpointError, StaleAttempt

__all__ = [
    "Attempt",
    "Checkpoint",
    "CheckpointError",
    "CheckpointWriter",
    "Owner",
    "Ranking",
    "Retention",
    "StaleAttempt",
    "best_intact",
    "branch",
    "full_state_dict",
    "intact",
    "live_owner",
    "missing",
    "newest_intact",
    "newest_sound",
    "newest_state",
    "owner_has_ended",
    "published",
    "require_no_owner",
    "send_heartbeat",
]
