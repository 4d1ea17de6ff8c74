"""Looking inside a finished model: what its attention heads attend to, and what they are worth."""
