"""What learners are called in metrics, checkpoints and tables, and as sources of knowledge."""

from __future__ import annotations

TEACHER = "teacher"
OWN = "own"  # a source: the learner's own last head


def student_key(name: str) -> str:
    """The name of a student, which is its key in YAML, among learners."""
    return f"students/{name}"
