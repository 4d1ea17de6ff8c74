"""How a run starts, resumes, forks and ends."""
