"""The names of learners in metrics, checkpoints and tables, and as sources that terms read."""

from __future__ import annotations

TEACHER = "teacher"
OWN = "own"  # a source: the learner's own last head


def student_key(name: str) -> str:
    """The full name of the student with this key in YAML."""
    return f"students/{name}"
