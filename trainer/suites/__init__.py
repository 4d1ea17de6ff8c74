"""Suites: several models compared on several tasks."""
