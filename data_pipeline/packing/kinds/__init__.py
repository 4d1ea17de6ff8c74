"""Packings: each is a class here or in a Python file of the user's, named by a job's ``plugins``.

Importing this package registers those in it (`data_pipeline.packing.sequences.register_packing`).
RoBERTa (arXiv 1907.11692, section 4.2) defines most of them, ALBERT (1909.11942) sentence order.
"""

import importlib
import pkgutil

from data_pipeline.packing.sequences import PACKINGS

__all__ = ["PACKINGS"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
