"""The commands. Each imports large packages only when it runs."""
