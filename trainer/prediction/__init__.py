"""Predictions of a fine-tuned, exported model on examples of its task."""
