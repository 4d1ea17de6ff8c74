"""The trainer: one teacher, any number of students, one step."""
