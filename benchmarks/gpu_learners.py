"""The learners that `gpu.py` measures, of Tandem and of `transformers`, at real or toy size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

import data_pipeline
from data_pipeline import Batch, Target
from model import EncoderConfig
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner, StepShape
from trainer.objectives import ObjectiveConfig
from trainer.objectives.terms import SoftKL
from trainer.step import train_step
from trainer.tasks.masked_language_modelling import MaskedLanguageModelling

MASKED_FRACTION, STEPS = 0.15, 1_000_000
Step = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """A BERT, and the micro-batch that it is trained on."""

    name: str
    hidden_size: int
    layers: int
    length: int
    rows: int
    vocabulary: int = 30522

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

    @property
    def masked(self) -> int:
        """Masked positions in a row."""
        return round(MASKED_FRACTION * self.length)


def random_batch(size: Size, seed: int = 0) -> Batch:
    """Full rows of random tokens."""
    rng, shape = np.random.default_rng(seed), (size.rows, size.length)
    ids = rng.integers(5, size.vocabulary, shape)
    positions = np.sort(np.argsort(rng.random(shape), axis=1)[:, : size.masked], axis=1)
    labels = np.take_along_axis(ids, positions, axis=1)
    return Batch(
        input_ids=ids,
        segment_ids=np.zeros_like(ids),
        attention_mask=np.ones_like(ids),
        targets={data_pipeline.MASKED: Target(labels, positions)},
        sample_ids=np.arange(size.rows),
        epochs=np.zeros(size.rows, dtype=np.int64),
    )


def teacher(size: Size, zero_stage: int = 0, is_compiled: bool = False) -> Learner:
    """A learner of this size that minimises the masked-LM loss in bf16."""
    objective = ObjectiveConfig(mlm=MaskedLanguageModelling())
    return _learner(TEACHER, size, size.encoder, objective, zero_stage, is_compiled)


def student(number: int, size: Size, hidden_size: int, layers: int, zero_stage: int = 0) -> Learner:
    """A learner from the teacher's soft labels as well."""
    objective = ObjectiveConfig(mlm=MaskedLanguageModelling(), soft_kl=SoftKL(temperature=2.0))
    encoder = size.student(hidden_size, layers)
    return _learner(student_key(f"s{number}"), size, encoder, objective, zero_stage, False)


def _learner(
    name: str,
    size: Size,
    encoder: EncoderConfig,
    objective: ObjectiveConfig,
    zero_stage: int,
    is_compiled: bool,
) -> Learner:
    config = LearnerConfig(
        model=encoder,
        objective=objective,
        precision="bf16",
        zero_stage=zero_stage,
        compile=is_compiled,
        masked_only=name == TEACHER,
    )
    return Learner(name, config, size.encoder, StepShape(STEPS, 0, size.rows, 1))


def our_step(learner: Learner, batch: Batch) -> Step:
    """A step of a single learner."""
    return lambda: train_step(learner, [], batch, 0)


def their_step(size: Size, batch: Batch, device: torch.device) -> Step:
    """A step of BertForMaskedLM with SDPA; compiled on a GPU only, since a CPU needs a compiler."""
    config = BertConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden_size, num_hidden_layers=size.layers,
        num_attention_heads=size.hidden_size // 64, intermediate_size=4 * size.hidden_size,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    trained = BertForMaskedLM(config).train().to(device)
    assert trained.config._attn_implementation == "sdpa"
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=True)
    run = torch.compile(trained) if device.type == "cuda" else trained
    ids, labels = (torch.from_numpy(x).to(device) for x in (batch.input_ids, batch.labels()))

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = run(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
