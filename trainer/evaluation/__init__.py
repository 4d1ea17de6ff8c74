"""Scores of learners on held-out text, during a run and after it."""
