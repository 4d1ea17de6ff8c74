"""Detecting failures in a run: bad losses, hangs, slow ranks, diverged replicas; and rollbacks."""
