"""Choosing the positions to predict, and what the model sees there."""
