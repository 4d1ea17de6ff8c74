"""From text to a corpus; merging and checking it."""
