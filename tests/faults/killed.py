"""A rank of the real job that kills itself: `python -m tests.faults.killed RANK EVENT …`.

Rank number RANK sends itself SIGKILL before its EVENT-th opening, making, renaming or removing of
anything in the checkpoint folder, and so inside of any phase of a save. The rest of the command
line is `tandem`'s own.
"""

from __future__ import annotations

import os
import sys

import tandem
from tests.trainer.checkpoint.saving import kill_at

if __name__ == "__main__":
    rank, event = sys.argv.pop(1), sys.argv.pop(1)
    if os.environ["RANK"] == rank:
        kill_at(int(event), "/checkpoints")
    tandem.main()
