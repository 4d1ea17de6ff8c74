"""What can go wrong in a run, and what is then done."""
