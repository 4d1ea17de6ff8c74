"""Modules of task heads: each is a module here or a Python file of the user's, as ``plugins`` name.

It has a config (`model.task_head_config.register_head`), which builds it. Importing this package
registers those in it.
"""

from configs.kinds import import_modules

import_modules(__name__, __path__)
