"""How good predictions are: pure functions of a batch and the outputs of a model."""
