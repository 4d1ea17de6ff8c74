"""Schedules: each is a config here or in a Python file of the user's, named by a job's ``plugins``.

Importing this package registers those in it (`trainer.schedules.learning_rate.register_schedule`).
"""

from configs.kinds import import_modules

import_modules(__name__, __path__)
