"""Optimizers that are correct at every ZeRO stage; each is a module in `kinds`."""

import trainer.optimizers.kinds  # noqa: F401 - registers them
