"""Scores on held-out text, of a run in progress and of a finished one."""
