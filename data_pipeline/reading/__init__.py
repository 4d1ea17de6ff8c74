"""From an open corpus to the batches of a rank."""
