"""Optimizers: each is a module here or a Python file of the user's, named by a job's ``plugins``.

It has a config (`trainer.optimizers.config.register_optimizer`), which builds a
`torch.optim.Optimizer`. Importing this package registers the optimizers in it.
"""

from configs.kinds import import_modules

import_modules(__name__, __path__)
