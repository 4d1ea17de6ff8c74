"""Losses and relations between teacher and student: pure functions that return (sum, count)."""
