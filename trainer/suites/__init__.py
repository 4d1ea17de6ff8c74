"""Several models compared on several tasks."""
