"""The parts of `compare_revisions.py`. Nothing here imports a revision's packages."""
