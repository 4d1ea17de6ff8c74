"""Modules of task heads: each is a module here or a Python file of the user's, as ``plugins`` name.

It has a config (`model.task_head_config.register_head`), which builds it. Importing this package
registers those in it.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
