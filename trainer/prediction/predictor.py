"""The base of predictors, one for each kind of head: they read inputs and decode outputs."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from data_pipeline import TextEncoder
from data_pipeline.task_files.contents import source_name
from model import TaskHeadConfig, Transitions
from trainer.prediction.passes import Segments
from trainer.task_facts import TaskFacts

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Query:
    """One example: the input as read, and what the model reads for it, numbers beside texts."""

    sequences: Sequence[Segments]
    source: Any = None
    numbers: Sequence[float] = ()


class Predictor(ABC):
    """Reads the input of one model's task and decodes its head's output.

    `transitions` belong to a head with a CRF. `columns`: those that the user names. placed_fields:
    the fields besides texts that have columns.
    """

    placed_fields: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        head: TaskHeadConfig,
        facts: TaskFacts,
        encoder: TextEncoder,
        transitions: Transitions | None,
        columns: Mapping[str, str],
    ) -> None:
        self.head, self.facts, self.encoder = head, facts, encoder
        self.transitions, self.columns = transitions, columns
        self.unanswered = 0  # the queries so far that have no text

    @abstractmethod
    def queries(self, path: str) -> Iterator[Query]:
        """The examples of a file, in order. Raises DataError, naming the line, for a bad one."""

    @abstractmethod
    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        """The prediction, in JSON values, from the outputs for each of the query's sequences."""


def tell_incomplete(
    path: str, unanswered: int, encoder: TextEncoder, needed: str = "a text"
) -> None:
    """Log how many rows of a file lack what is `needed`, and how many were cut, if any."""
    name = source_name(path)
    if unanswered:
        why = f"rows without {needed}, whose answers are null"
        _log.warning("%s: %s: %s", name, why, unanswered)
    if encoder.cut:
        why = f"texts too long for {encoder.length} tokens, whose ends are not read"
        _log.warning("%s: %s: %s", name, why, len(encoder.cut))
