"""Kinds of models besides the encoder: each is a module here or a Python file of the user's.

A kind has a config and a module (`model.protocol.register`). Importing this package registers the
kinds in it; a job's ``plugins`` may add more.
"""

import importlib
import pkgutil

import model.masked_language_model  # noqa: F401 - the encoder is the first kind

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
