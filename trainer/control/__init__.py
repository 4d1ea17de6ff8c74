"""What people and other processes ask of a run, and how it answers."""
