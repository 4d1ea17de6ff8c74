"""What follows from the step alone: the learning rate, the layers of a growing teacher."""
