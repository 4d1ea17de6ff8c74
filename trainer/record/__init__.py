"""What a run says of itself: its metrics, the display, Weights & Biases."""
