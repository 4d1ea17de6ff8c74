"""Reading a corpus: from its files to the batches of a rank."""
