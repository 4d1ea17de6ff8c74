"""A rank of the real job that kills itself: `python -m tests.faults.killed RANK PHASE NUMBER …`.

Rank RANK sends itself SIGKILL when it reaches that phase of a save for the NUMBER-th time. The rest
of the command line is `tandem`'s own.
"""

from __future__ import annotations

import os
import sys

import tandem
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

if __name__ == "__main__":
    rank, phase, number = (sys.argv.pop(1) for _ in range(3))
    if os.environ["RANK"] == rank:
        act, part = PHASES[phase]
        kill_at(int(number), part, (act,))
    tandem.main()
