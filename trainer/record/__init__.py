"""The record of a run in progress: metrics, the display, the report."""
