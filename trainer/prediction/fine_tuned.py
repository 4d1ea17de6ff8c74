"""A fine-tuned model as it was exported, and the base of predictors for the kinds of its heads."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from data_pipeline import TextEncoder
from data_pipeline.task_files.contents import source_name
from model import Model, ModelError, TaskHeadConfig, Transitions, from_pretrained
from model.heads import TaskHead
from trainer.prediction.passes import Segments, early_outputs, head_outputs
from trainer.task_facts import TaskFacts, chosen_head, open_encoder


@dataclass(frozen=True)
class FineTuned:
    """A model with the head of a task. `name` is that of the head."""

    folder: Path
    model: Model
    name: str
    facts: TaskFacts
    encoder: TextEncoder

    @classmethod
    def open(
        cls,
        folder: Path,
        device: torch.device,
        head: str | None = None,
        encoding: str | None = None,
    ) -> FineTuned:
        """`head` names the one to use of several; `encoding` is that of its input, if another.

        Raises ModelError for a model without that head, DataError without its tokenizer.
        """
        return cls.of(folder, from_pretrained(folder).to(device), head, encoding)

    @classmethod
    def of(
        cls, folder: Path, model: Model, head: str | None = None, encoding: str | None = None
    ) -> FineTuned:
        """The fine-tuned `model` that is in the folder, with what `open` reads beside it."""
        name = chosen_head(folder, list(model.config.task_heads), head)
        facts = TaskFacts.read(folder, name).in_encoding(encoding)
        encoder = open_encoder(folder, model.config, facts.sequence_length)
        return cls(folder, model, name, facts, encoder)

    @property
    def head(self) -> TaskHeadConfig:
        """The declaration of the head."""
        return self.model.config.task_heads[self.name]

    def outputs(
        self, sequences: Sequence[Segments], numbers: Sequence[Sequence[float]] | None = None
    ) -> list[Tensor]:
        """The outputs of the head (`head_outputs`); `numbers` are left out if it reads none."""
        read = numbers if self.head.numbers else None
        return head_outputs(self.model, self.name, self.encoder.vocabulary, sequences, read)

    def early_outputs(
        self, sequences: Sequence[Segments], speed: float
    ) -> list[tuple[Tensor, int]]:
        """The outputs of branches (`passes.early_outputs`). Raises ModelError without any."""
        if not self.head.branches:
            why = "--speed: the model has no branches; `tandem finetune fastbert` trains them"
            raise ModelError(f"{self.folder}: {why}")
        return early_outputs(self.model, self.name, self.encoder.vocabulary, sequences, speed)

    @torch.inference_mode()
    def transitions(self) -> Transitions | None:
        """The weights of the head's CRF, on the CPU, where its answers are made."""
        head = self.model.task_heads[self.name]
        if not isinstance(head, TaskHead) or head.crf is None:
            return None
        return Transitions(*(part.cpu() for part in head.crf()))


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
