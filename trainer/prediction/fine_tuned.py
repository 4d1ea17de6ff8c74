"""A fine-tuned model as it was exported: its head, its tokenizer, and how its task was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data_pipeline import TextEncoder
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
