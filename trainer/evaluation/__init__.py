"""Held-out scores of learners, while a job trains and once it has."""
