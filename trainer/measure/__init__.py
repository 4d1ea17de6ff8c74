"""What a job takes: time, bytes, FLOPs; counted ahead, or measured as it runs."""
