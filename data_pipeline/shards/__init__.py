"""The files of a corpus: WebDataset shards, the index beside them, and the manifest."""
