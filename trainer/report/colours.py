"""The colours of learners."""

from __future__ import annotations

from trainer.run_folder.run_files import RunFiles

COLOURS = 8  # in the style sheet: --c0 to --c7


def colour(run: RunFiles, learner: str) -> int:
    """The number of a learner's colour, the same on the whole page."""
    return run.learners.index(learner) % COLOURS
