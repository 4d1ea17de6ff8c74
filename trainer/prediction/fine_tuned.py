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
from trainer.own_tokenizer import open_encoder
from trainer.prediction.passes import Segments, early_outputs, head_outputs
from trainer.task_facts import TaskFacts


@dataclass(frozen=True)
class FineTuned:
    """A model with the head of a task. `name` is that of the head."""

    folder: Path
    model: Model
    name: str
    facts: TaskFacts
    encoder: TextEncoder

    @classmethod
    def open(cls, folder: Path, device: torch.device, head: str | None = None) -> FineTuned:
        """`head` names the one to use of several.

        Raises ModelError for a model without that head, DataError without its tokenizer.
        """
        return cls.of(folder, from_pretrained(folder).to(device), head)

    @classmethod
    def of(cls, folder: Path, model: Model, head: str | None = None) -> FineTuned:
        """As `open`, of the `model` that is in the folder."""
        name = _chosen(folder, list(model.config.task_heads), head)
        facts = TaskFacts.read(folder, name)
        encoder = open_encoder(folder, model.config, facts.sequence_length)
        return cls(folder, model, name, facts, encoder)

    @property
    def head(self) -> TaskHeadConfig:
        """The declaration of the head."""
        return self.model.config.task_heads[self.name]

    def outputs(self, sequences: Sequence[Segments]) -> list[Tensor]:
        """As `head_outputs`."""
        return head_outputs(self.model, self.name, self.encoder.vocabulary, sequences)

    def early_outputs(
        self, sequences: Sequence[Segments], speed: float
    ) -> list[tuple[Tensor, int]]:
        """As `trainer.prediction.passes.early_outputs`. Raises ModelError without branches."""
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
        return Transitions(*(one.cpu() for one in head.crf()))


def _chosen(folder: Path, heads: list[str], head: str | None) -> str:
    if not heads:
        raise ModelError(f"{folder}: has no head of a task; fine-tune it with `tandem finetune`")
    if head is None and len(heads) > 1:
        raise ModelError(f"{folder}: has several heads; choose one with --head: {', '.join(heads)}")
    if head is not None and head not in heads:
        raise ModelError(f"{folder}: has no head {head}; there are: {', '.join(heads)}")
    return head or heads[0]
