"""What goes wrong in a run is noticed, named and ended."""
