"""Trackers: each is a class here or in a Python file of the user's, named by a job's ``plugins``.

Importing this package registers those in it (`trainer.tracking.trackers.register_tracker`).
"""

from configs.kinds import import_modules

import_modules(__name__, __path__)
