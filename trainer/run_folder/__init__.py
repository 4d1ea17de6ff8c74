"""The files in a run folder: their paths, and how they are read and written."""
