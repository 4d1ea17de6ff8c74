"""What a job needs, computed before it runs: parameters, memory, floating-point operations."""
