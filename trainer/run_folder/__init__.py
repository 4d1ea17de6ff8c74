"""The files in the folder of a run: where they lie, and how they are read."""
