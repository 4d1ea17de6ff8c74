"""The needs of a job, computed before it runs: parameters, memory, floating-point operations."""
