"""What a run tells people while it is in progress: metrics, the display, the report."""
