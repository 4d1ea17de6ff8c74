"""The learners that `gpu.py` measures, of Tandem and of `transformers`, at real or toy size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.masked_batches import VOCABULARY, masked_batch
from benchmarks.transformers_step import transformers_step
from data_pipeline import Batch
from model import EncoderConfig
from trainer.batch_config import StepShape
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.objectives import ObjectiveConfig
from trainer.objectives.terms.predictions import SoftKL
from trainer.step import train_step
from trainer.tasks.pretraining import MaskedLanguageModelling

STEPS = 1_000_000
Step = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """A BERT, and the micro-batch that it is trained on."""

    name: str
    hidden_size: int
    layers: int
    length: int
    rows: int
    vocabulary: int = VOCABULARY

    @property
    def encoder(self) -> EncoderConfig:
        """Without a pooler, which masked language modelling does not train."""
        return self.student(self.hidden_size, self.layers)

    def student(self, hidden_size: int, layers: int) -> EncoderConfig:
        """Another BERT that reads the same tokens."""
        return EncoderConfig(
            vocab_size=self.vocabulary, hidden_size=hidden_size, layers=layers,
            heads=hidden_size // 64, ffn_size=4 * hidden_size, pooler="none",
        )  # fmt: skip


def batch_of(size: Size, seed: int = 0) -> Batch:
    """A micro-batch of random tokens."""
    return masked_batch(size.rows, size.length, size.vocabulary, seed)


def teacher(
    size: Size, zero_stage: int = 0, precision: str = "bf16", is_compiled: bool | None = None
) -> Learner:
    """A learner of this size that minimises the masked-LM loss; compiled (None) on a GPU."""
    objective = ObjectiveConfig(mlm=MaskedLanguageModelling())
    return _learner(TEACHER, size, size.encoder, objective, zero_stage, precision, is_compiled)


def student(number: int, size: Size, hidden_size: int, layers: int, zero_stage: int = 0) -> Learner:
    """A learner from the teacher's soft labels as well, in bf16."""
    objective = ObjectiveConfig(mlm=MaskedLanguageModelling(), soft_kl=SoftKL(temperature=2.0))
    encoder = size.student(hidden_size, layers)
    return _learner(student_key(f"s{number}"), size, encoder, objective, zero_stage, "bf16", None)


def _learner(
    name: str,
    size: Size,
    encoder: EncoderConfig,
    objective: ObjectiveConfig,
    zero_stage: int,
    precision: str,
    is_compiled: bool | None,
) -> Learner:
    config = LearnerConfig(
        model=encoder,
        objective=objective,
        precision=precision,
        zero_stage=zero_stage,
        compile=is_compiled,
        masked_only=name == TEACHER,
    )
    return Learner(name, config, size.encoder, StepShape(STEPS, 0, size.rows, 1))


def our_step(learner: Learner, batch: Batch) -> Step:
    """A step of a single learner."""
    return lambda: train_step(learner, [], batch, 0)


def their_step(size: Size, batch: Batch, device: torch.device) -> Step:
    """A step of BertForMaskedLM in bf16."""
    return transformers_step(size.encoder, batch, device, "bf16")
