"""What `compare_revisions.py` consists of. Nothing here imports a revision's packages."""
