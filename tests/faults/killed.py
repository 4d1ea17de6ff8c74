"""A rank of the real job that kills itself inside a save."""

from __future__ import annotations

import os

from tests.trainer.checkpoint.saving import kill_at

# What is about to be done to what: the beginning of the name of an audit event, and its arguments.
PHASES = {
    "begin": ("os.mkdir", r"\.writing-"),
    "tensors": ("open", r"\.writing-.*\.safetensors"),
    "state": ("open", r"\.writing-\d+/trainer\.json"),
    "manifest": ("open", r"\.writing-\d+/manifest\.json"),
    "sync": ("open", r"\.writing-\d+'"),
    "publish": ("os.rename", r"\.writing-"),
    "sync of the name": ("open", r"/checkpoints'"),
    "forget": ("os.rename", r"\.deleted-"),
    "remove": ("shutil.rmtree", r"\.deleted-"),
}


def kill_in(rank: int, phase: str, number: int) -> None:
    """Have rank `rank` send itself SIGKILL when it reaches this phase for the `number`-th time."""
    if os.environ["RANK"] == str(rank):
        act, part = PHASES[phase]
        kill_at(number, part, (act,))
