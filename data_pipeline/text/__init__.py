"""From files to documents and sentences."""
