"""The parts of a learner's step, as metrics name them."""

FORWARD, BACKWARD, STEP, COMMUNICATION = PARTS = ("forward", "backward", "step", "communication")
