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
from trainer.prediction.passes import Segments, head_outputs
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
    def open(cls, folder: Path, device: torch.device) -> FineTuned:
        """Raises ModelError for a model without a task's head, DataError without a tokenizer."""
        model = from_pretrained(folder).to(device)
        if not model.task_heads:
            raise ModelError(
                f"{folder}: has no head of a task; fine-tune it with `tandem finetune`"
            )
        facts = TaskFacts.read(folder)
        longest = model.config.longest_sequence or facts.sequence_length
        encoder = TextEncoder(folder, min(facts.sequence_length, longest))
        return cls(folder, model, next(iter(model.task_heads)), facts, encoder)

    @property
    def head(self) -> TaskHeadConfig:
        """The declaration of the head."""
        return self.model.config.task_heads[self.name]

    def outputs(self, sequences: Sequence[Segments]) -> list[Tensor]:
        """As `head_outputs`."""
        return head_outputs(self.model, self.name, self.encoder.vocabulary, sequences)

    @torch.inference_mode()
    def transitions(self) -> Transitions | None:
        """The weights of the head's CRF, on the CPU, where its answers are made."""
        head = self.model.task_heads[self.name]
        assert isinstance(head, TaskHead)
        return None if head.crf is None else Transitions(*(one.cpu() for one in head.crf()))
