"""How a run starts, resumes and forks, and saves while it is in progress."""
