"""Parts of the command line. What is large is imported when a command needs it."""
