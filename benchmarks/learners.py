"""Learners on random tokens, of Tandem and of `transformers`: speed does not depend on the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM

from cluster.ranks import derive, export
from data_pipeline import MASKED, Batch, Target
from model import EncoderConfig
from model.hugging_face.conversion import to_transformers
from model.initialisation import skeleton
from trainer.batch_config import StepShape
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER, student_key
from trainer.learners.engine import join_process_group
from trainer.learners.learner import Learner
from trainer.learners.module import AUTOCAST
from trainer.objectives import ObjectiveConfig
from trainer.objectives.terms.predictions import SoftKL
from trainer.step import train_step
from trainer.tasks.pretraining import MaskedLanguageModelling

VOCABULARY, LENGTH = 30522, 128  # of BERT, and of its shorter sequences
MASKED_FRACTION = 0.15
FIRST_WORD = 5  # the ids below are special tokens
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
        return self.smaller(self.hidden_size, self.layers)

    def smaller(self, hidden_size: int, layers: int) -> EncoderConfig:
        """Another BERT that reads the same tokens."""
        return EncoderConfig(
            vocab_size=self.vocabulary, hidden_size=hidden_size, layers=layers,
            heads=max(1, hidden_size // 64), ffn_size=4 * hidden_size, pooler="none",
        )  # fmt: skip


def join_alone() -> torch.device:
    """Join a process group of this process alone; returns its device."""
    export(derive({}))
    return join_process_group()


def masked_batch(
    rows: int, length: int = LENGTH, vocabulary: int = VOCABULARY, seed: int = 0
) -> Batch:
    """Full rows of random tokens, with equally many masked positions in each (19 of 128)."""
    rng, shape = np.random.default_rng(seed), (rows, length)
    ids = rng.integers(FIRST_WORD, vocabulary, shape)
    masked = round(MASKED_FRACTION * length)
    positions = np.sort(np.argsort(rng.random(shape), axis=1)[:, :masked], axis=1)
    labels = np.take_along_axis(ids, positions, axis=1)
    return Batch(
        input_ids=ids,
        segment_ids=np.zeros_like(ids),
        attention_mask=np.ones_like(ids),
        targets={MASKED: Target(labels, positions)},
        sample_ids=np.arange(rows),
        epochs=np.zeros(rows, dtype=np.int64),
    )


def batch_of(size: Size, seed: int = 0) -> Batch:
    """A micro-batch of random tokens."""
    return masked_batch(size.rows, size.length, size.vocabulary, seed)


def teacher(encoder: EncoderConfig, rows: int, **settings: Any) -> Learner:
    """A learner that minimises the masked-LM loss; `settings` are of LearnerConfig."""
    objective = ObjectiveConfig(mlm=MaskedLanguageModelling())
    config = LearnerConfig(model=encoder, objective=objective, **settings)
    return Learner(TEACHER, config, encoder, StepShape(STEPS, 0, rows, 1))


def student(number: int, size: Size, hidden_size: int, layers: int, **settings: Any) -> Learner:
    """A learner from the soft labels of a teacher of this size as well."""
    encoder = size.smaller(hidden_size, layers)
    objective = ObjectiveConfig(mlm=MaskedLanguageModelling(), soft_kl=SoftKL(temperature=2.0))
    config = LearnerConfig(model=encoder, objective=objective, **settings)
    shape = StepShape(STEPS, 0, size.rows, 1)
    return Learner(student_key(f"s{number}"), config, size.encoder, shape)


def our_step(learner: Learner, batch: Batch) -> Step:
    """A step of a single learner."""
    return lambda: train_step(learner, [], batch, 0)


def transformers_step(
    shape: EncoderConfig, batch: Batch, device: torch.device, precision: str
) -> Step:
    """A step of the same masked LM, compiled on a GPU only, since a CPU needs a compiler.

    It uses SDPA where the class has it, its own loss, fused AdamW, and gradients clipped at norm 1,
    as its Trainer does by default; no dropout. Losses are not scaled in fp16, which changes no
    speed.
    """
    shape = shape.with_dropout(0.0)
    config, _ = to_transformers(shape, skeleton(shape).state_dict())
    known = AutoConfig.for_model(**config)
    if hasattr(known, "sparse_prediction"):
        known.sparse_prediction = True  # the output layer reads masked tokens only
    theirs = AutoModelForMaskedLM.from_config(known)
    trained = theirs.train().to(device)
    assert shape.positions == "relative" or trained.config._attn_implementation == "sdpa"
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=True)
    run = torch.compile(trained) if device.type == "cuda" else trained
    ids, labels = (torch.from_numpy(x).to(device) for x in (batch.input_ids, batch.labels()))
    dtype = AUTOCAST[precision]

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss: Tensor = run(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
