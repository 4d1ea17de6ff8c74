"""What a run reports while it is in progress: metrics, the display, the report."""
