"""Trackers: a process beside the job feeds each from its metrics.jsonl."""
