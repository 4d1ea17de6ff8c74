"""Batches of random tokens with masked positions: speed does not depend on the text."""

from __future__ import annotations

import numpy as np

from data_pipeline import MASKED, Batch, Target

VOCABULARY, LENGTH = 30522, 128  # of BERT, and of its shorter sequences
MASKED_FRACTION = 0.15
FIRST_WORD = 5  # the ids below are special tokens


def masked_batch(
    rows: int, length: int = LENGTH, vocabulary: int = VOCABULARY, seed: int = 0
) -> Batch:
    """Full rows of random tokens, with equally many masked positions in each (19 of 128)."""
    rng, shape = np.random.default_rng(seed), (rows, length)
    ids = rng.integers(FIRST_WORD, vocabulary, shape)
    masked = round(MASKED_FRACTION * length)
    positions = np.sort(np.argsort(rng.random(shape), axis=1)[:, :masked], axis=1)
    labels = np.take_along_axis(ids, positions, axis=1)
    return Batch(
        input_ids=ids,
        segment_ids=np.zeros_like(ids),
        attention_mask=np.ones_like(ids),
        targets={MASKED: Target(labels, positions)},
        sample_ids=np.arange(rows),
        epochs=np.zeros(rows, dtype=np.int64),
    )
