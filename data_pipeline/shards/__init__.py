"""WebDataset shards, the index beside them, and the files of a corpus."""
