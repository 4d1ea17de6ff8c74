"""Mixtures: which row of the global batch reads which corpus.

The rows are shared out once, in proportion to the weights (largest remainder), and spread evenly
over the batch, so that every rank's run of rows holds about the same mixture. Each corpus then
has lanes, epochs and an order of its own, as if it were trained on alone with its share of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError


def rows_of_sources(weights: Sequence[float], batch_size: int) -> NDArray[np.int64]:
    """The number of the source that each of `batch_size` rows reads: [batch_size].

    Raises DataError when a source would get no row at all.
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
