"""A run and those who want something of it: other processes, signals, people."""
