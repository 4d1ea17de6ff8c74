"""What a job reads: its corpora, its global batches, and copies of them on the node."""
