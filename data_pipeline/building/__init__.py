"""Building, merging and checking a corpus."""
