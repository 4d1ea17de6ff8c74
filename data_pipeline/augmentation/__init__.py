"""More examples of a task, from those that it has: texts in which words are replaced."""
