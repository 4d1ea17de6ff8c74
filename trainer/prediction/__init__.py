"""What a fine-tuned, exported model says about examples of its task."""
