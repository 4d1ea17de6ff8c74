"""How good predictions are: metrics of a batch and the outputs of a model."""
