"""Labelled examples of a task: encoded once into the shards of a corpus, read in batches."""
