"""Which positions are predicted, and what they show."""
