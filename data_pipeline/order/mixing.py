"""Mixtures: which row of the global batch reads which corpus.

The rows are assigned once, in proportion to the weights (largest remainder). Each corpus gets rows
spread evenly over the batch, so that every rank reads about the same mixture. Each corpus has its
own lanes, epochs and order, as if it were the only one and the batch had only its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError


def rows_of_sources(weights: Sequence[float], batch_size: int) -> NDArray[np.int64]:
    """The number of the source that each row of the global batch reads: [batch_size].

    Raises DataError if a source would get no row.
    """
    quotas = np.array(weights) / np.sum(weights) * batch_size
    rows = np.floor(quotas).astype(np.int64)
    by_remainder = np.argsort(rows - quotas, kind="stable")
    rows[by_remainder[: batch_size - int(rows.sum())]] += 1
    if not rows.all():
        raise DataError(
            f"data.mixture: a corpus gets none of {batch_size} rows; "
            "raise its weight or the global batch size"
        )
    # Source s wants its rows at (0.5 + i) / rows[s] of the batch.
    wanted = np.concatenate([(0.5 + np.arange(count)) / count for count in rows])
    return np.repeat(np.arange(len(rows)), rows)[np.argsort(wanted, kind="stable")]
