"""What a predictor of a kind of head is: it reads the task's input and words the head's output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from data_pipeline import TextEncoder
from model import TaskHeadConfig, Transitions
from trainer.prediction.passes import Segments
from trainer.task_facts import TaskFacts


@dataclass(frozen=True)
class Query:
    """One example of the input: the sequences that the model reads of it, and what it was."""

    sequences: Sequence[Segments]
    source: Any = None


class Predictor(ABC):
    """Of one model and its task. `transitions`: of a head with a CRF."""

    def __init__(
        self,
        head: TaskHeadConfig,
        facts: TaskFacts,
        encoder: TextEncoder,
        transitions: Transitions | None,
    ) -> None:
        self.head, self.facts, self.encoder = head, facts, encoder
        self.transitions = transitions

    @abstractmethod
    def queries(self, path: str) -> Iterator[Query]:
        """The examples of a file, in order; DataError, naming file and line, for a bad one."""

    @abstractmethod
    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        """The prediction, of the outputs for each of the query's sequences; JSON values."""
