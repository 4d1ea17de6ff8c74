"""How learners come and go in a job, and when a step or a config is not taken."""
