"""The data of a job: its corpora, its global batches, and copies of them on the nodes."""
