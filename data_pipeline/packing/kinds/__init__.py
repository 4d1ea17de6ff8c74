"""Packings: each is a class here or in a Python file of the user's, named by a job's ``plugins``.

Importing this package registers those in it (`data_pipeline.packing.sequences.register_packing`).
RoBERTa (arXiv 1907.11692, section 4.2) defines most of them, ALBERT (1909.11942) sentence order.
"""

from configs.kinds import import_modules
from data_pipeline.packing.sequences import PACKINGS

__all__ = ["PACKINGS"]

import_modules(__name__, __path__)
