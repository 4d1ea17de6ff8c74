"""Learners: models in training, with their state, engine, admission and initial weights."""
