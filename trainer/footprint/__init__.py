"""What a job needs before it runs: parameters, memory, floating-point operations."""
