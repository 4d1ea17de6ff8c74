"""The trainer: it trains one teacher and any number of students in one step."""
