"""Kinds of models besides the encoder: each is a module here or a Python file of the user's.

A kind has a config and a module (`model.protocol.register`). Importing this package registers the
kinds in it; a job's ``plugins`` may add more.
"""

import model.masked_language_model  # noqa: F401 - the encoder is the first kind
from configs.kinds import import_modules

import_modules(__name__, __path__)
