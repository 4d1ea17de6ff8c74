"""Kinds of models besides the encoder: each is a module here, or in a file of the user's own.

A kind brings its config and its module (`model.protocol.register`). Importing this package finds
those that are in it; a job's ``plugins`` may bring more.
"""

from __future__ import annotations

import importlib
import pkgutil

import model.masked_language_model  # noqa: F401 - the encoder is the first kind

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
