"""An encoded example, and what is known of all examples of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What a target has a value for: the example, or each token; or as many values as there are.
WHOLE, TOKENS, SEVERAL = "whole", "tokens", "several"

Segment = NDArray[np.integer]  # token ids, without special tokens


@dataclass(frozen=True)
class EncodedExample:
    """One example: its sequences, each of one or two segments, and its targets by name.

    A target of the example is a number, or a tuple of whole numbers; a target of its tokens has one
    for each token of the segments, in order, -100 where there is none. predicted: the number of the
    sequence whose tokens, but the first, are to be predicted: batches have them as `MASKED`.
    columns: numbers that a model reads beside the text, by name.
    """

    sequences: Sequence[Sequence[Segment]]
    targets: Mapping[str, float | tuple[int, ...] | NDArray[np.int64]]
    predicted: int | None = None
    columns: Mapping[str, float] = field(default_factory=dict)

    @property
    def segments(self) -> list[Segment]:
        """The segments of all sequences, in order."""
        return [segment for sequence in self.sequences for segment in sequence]


_KINDS: Mapping[type, str] = {np.ndarray: TOKENS, tuple: SEVERAL}


@dataclass(frozen=True)
class Layout:
    """What all examples of a task have in common.

    segments: how many each of an example's sequences has. targets: each target's name, with what
    it has a value for (`WHOLE`, `TOKENS` or `SEVERAL`). numbers: the targets that are real numbers;
    the others are classes or positions. predicted: as in `EncodedExample`. columns: the names of
    its `columns`, in order.
    """

    segments: tuple[int, ...]
    targets: Mapping[str, str]
    numbers: tuple[str, ...] = ()
    predicted: int | None = None
    columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, example: EncodedExample) -> Layout:
        """The layout of one example, which the others must share."""
        targets = {name: _KINDS.get(type(value), WHOLE) for name, value in example.targets.items()}
        numbers = tuple(name for name, one in example.targets.items() if isinstance(one, float))
        segments = tuple(len(one) for one in example.sequences)
        return cls(segments, targets, numbers, example.predicted, tuple(example.columns))

    def dtype(self, target: str) -> np.dtype:
        """How a target is stored."""
        return np.dtype("<f4") if target in self.numbers else np.dtype("<i4")

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the manifest."""
        lists = {name: [*getattr(self, name)] for name in ("segments", "numbers", "columns")}
        return {**asdict(self), **lists}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Layout:
        """The reverse of `to_json`."""
        segments, numbers = tuple(tree["segments"]), tuple(tree["numbers"])
        columns = tuple(tree.get("columns", ()))
        return cls(segments, tree["targets"], numbers, tree.get("predicted"), columns)
