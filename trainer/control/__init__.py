"""Requests of users and other processes to a run, and its answers."""
