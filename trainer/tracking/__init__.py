"""Weights & Biases: a process beside the job follows its metrics.jsonl."""
