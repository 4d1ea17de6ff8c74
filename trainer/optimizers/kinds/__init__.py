"""Optimizers: each is a module here or a Python file of the user's, named by a job's ``plugins``.

It has a config (`trainer.optimizers.config.register_optimizer`), which builds a
`torch.optim.Optimizer`. Importing this package registers the optimizers in it.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
