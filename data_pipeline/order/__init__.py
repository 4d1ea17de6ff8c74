"""Which sequence each row of each step reads."""
