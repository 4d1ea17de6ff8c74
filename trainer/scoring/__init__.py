"""Metrics: they read a batch and a model's outputs, and report scores."""
