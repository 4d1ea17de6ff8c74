"""Reading documents from files, and splitting them into sentences."""
