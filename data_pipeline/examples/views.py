"""Views: the forms in which learners read an example beside its whole one.

A view is made of an example's segments. A view of pairs may mask tokens of the second text, which a
model that reads both then predicts (C-MLM, Chen et al., arXiv 1911.03829).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import MaskChoice, random_uint32, scalar_key
from data_pipeline.reading.batches import MASKED, Batch, Target


class Masks(Protocol):
    """Which tokens of a text are masked, and in which of an example's sequences."""

    is_redrawn: ClassVar[bool]  # whether an example has other masks in another epoch

    def __call__(self, tokens: int, epoch: int, number: int) -> NDArray[np.int64]:
        """The sequence in which each of an example's `tokens` is masked, from 0; -1: in none.

        `number` is that of the example.
        """


@dataclass(frozen=True)
class SomeTokens:
    """Each token with the probability `fraction`, anew in every epoch; at least one."""

    fraction: float
    seed: int

    is_redrawn: ClassVar[bool] = True

    def __call__(self, tokens: int, epoch: int, number: int) -> NDArray[np.int64]:
        key = np.array([scalar_key(self.seed, MaskChoice.VIEW, epoch, number)], np.uint64)
        draws = random_uint32(key, np.arange(tokens))[0]
        least = max(round(self.fraction * 2**32), int(draws.min()) + 1)
        return np.where(draws < least, 0, -1)


@dataclass(frozen=True)
class EveryToken:
    """Each token once: token j in sequence j mod C, of C `sequences`."""

    sequences: int

    is_redrawn: ClassVar[bool] = False

    def __call__(self, tokens: int, epoch: int, number: int) -> NDArray[np.int64]:
        return np.arange(tokens) % self.sequences


@dataclass(frozen=True)
class View:
    """One form of an example.

    sequences: the numbers of the segments that each of its sequences has. masks: what is masked of
    their second segments, which are then all the same; None: nothing.
    """

    sequences: Sequence[Sequence[int]]
    masks: Masks | None = None


def with_masks(batch: Batch, masks: Masks, mask: int) -> Batch:
    """The batch with the token `mask` in place of those that `masks` chooses, and their labels.

    It chooses among the tokens of the second segment and the [SEP] behind them. All sequences of an
    example are the same. `MASKED` has the labels in the order of the text, whichever sequence they
    are in.
    """
    rows, length = len(batch.input_ids), batch.input_ids.shape[-1]
    ids = batch.input_ids.reshape(rows, -1, length).copy()
    second = batch.segment_ids.reshape(ids.shape)[:, 0] == 1  # [R, L]
    found = []
    for row, (epoch, number) in enumerate(zip(batch.epochs, batch.sample_ids, strict=True)):
        columns = np.flatnonzero(second[row])
        chosen = masks(len(columns), int(epoch), int(number))
        columns, sequences = columns[chosen >= 0], chosen[chosen >= 0]
        found.append((ids[row, 0, columns], sequences * length + columns))
        ids[row, sequences, columns] = mask
    target = Target.of_rows(found)
    if batch.readable is not None:
        target = target.without(~batch.readable)
    targets = {**batch.targets, MASKED: target}
    return replace(batch, input_ids=ids.reshape(batch.input_ids.shape), targets=targets)
