"""Schedules: each is a config here or in a Python file of the user's, named by a job's ``plugins``.

Importing this package registers those in it (`trainer.schedules.learning_rate.register_schedule`).
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
