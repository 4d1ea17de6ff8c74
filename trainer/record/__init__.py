"""What a run tells people while it goes: metrics, the display, the report."""
