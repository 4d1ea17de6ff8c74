"""A tiny teacher, two students that together use most terms, and random batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline import DEFAULT_VIEW, MASKED, PAIRS, Batch, Target
from model import EncoderConfig
from trainer.batch_config import StepShape
from trainer.denominators import ATTENDED, ATTENDED_PAIRS, ROWS, InView, count
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.objectives import ObjectiveConfig
from trainer.objectives.terms.attention import (
    AttentionMSE,
    AttentionRelation,
    AttentionTransfer,
    KeyRelation,
    QueryRelation,
    ValueRelation,
)
from trainer.objectives.terms.divergences import AlphaBeta, DecoupledKD, JensenShannon, ReverseKL
from trainer.objectives.terms.own_predictions import EarlyExits, ZLoss
from trainer.objectives.terms.predictions import Blended, SoftKL
from trainer.objectives.terms.states import (
    PKD,
    Cosine,
    Embedding,
    FeatureMaps,
    HiddenMSE,
    MeanTransfer,
    VarianceTransfer,
)
from trainer.tasks.pretraining import MaskedLanguageModelling, NextSentence

VOCABULARY, LENGTH, CAPACITY = 97, 16, 3
STEPS, SEED = 20, 3


def encoder(**changes: Any) -> EncoderConfig:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "layers": 4, "heads": 4, "ffn_size": 64}
    return EncoderConfig(**{**sizes, "max_positions": LENGTH, **changes})


def learner_configs(stages: tuple[int, int, int]) -> dict[str, LearnerConfig]:
    """The teacher and both students, at these ZeRO stages."""
    mlm, nsp = MaskedLanguageModelling(), NextSentence()
    distilbert = ObjectiveConfig(
        mlm=MaskedLanguageModelling(2.0),
        nsp=nsp,
        soft_kl=SoftKL(5.0, 2.0, positions="attended", min_lead=None),
        cosine=Cosine(),
        early_exits=EarlyExits(0.5, layers=[1]),
        pkd=PKD(10.0),
        feature_maps=FeatureMaps(1.0),
        attention_transfer=AttentionTransfer(),
        decoupled_kd=DecoupledKD(0.25, min_lead=None),
        alpha_beta=AlphaBeta(min_lead=None),
        mean_transfer=MeanTransfer(5.0),
        variance_transfer=VarianceTransfer(),
    )
    tinybert = ObjectiveConfig(
        mlm=mlm,
        soft_kl=SoftKL(min_lead=None),
        blended=Blended(),
        reverse_kl=ReverseKL(0.5, 2.0, min_lead=None),
        jensen_shannon=JensenShannon(min_lead=None),
        embedding=Embedding(),
        hidden_mse=HiddenMSE(),
        attention_mse=AttentionMSE(),
        attention_relation=AttentionRelation(),
        value_relation=ValueRelation(),
        query_relation=QueryRelation(),
        key_relation=KeyRelation(relation_heads=8),
        z_loss=ZLoss(0.1),
    )
    return {
        TEACHER: LearnerConfig(
            model=encoder(), objective=ObjectiveConfig(mlm=mlm, nsp=nsp), zero_stage=stages[0]
        ),
        student_key("distilbert"): LearnerConfig(
            model=encoder(layers=2, norm="no_norm"), objective=distilbert, zero_stage=stages[1]
        ),
        student_key("tinybert"): LearnerConfig(
            model=encoder(hidden_size=16, layers=2), objective=tinybert, zero_stage=stages[2]
        ),
    }


def learners(
    stages: tuple[int, int, int],
    micro_batch: int,
    accumulation: int,
    dropout: float = 0.0,
    members: Sequence[int] = (0, 1, 2),
) -> list[Learner]:
    """Started engines of the teacher, member 0, and of the other members. Collective."""
    step_shape = StepShape(STEPS, SEED, micro_batch, accumulation)
    configs = learner_configs(stages)
    teacher = configs[TEACHER].model
    return [
        Learner(name, dataclasses.replace(config, dropout=dropout), teacher, step_shape)
        for name, config in (list(configs.items())[number] for number in members)
    ]


def with_pairs(batch: Batch, labels: NDArray[np.int64] | None) -> Batch:
    """The batch with other pair labels [R], or with none."""
    targets = {name: one for name, one in batch.targets.items() if name != PAIRS}
    if labels is not None:
        targets[PAIRS] = Target(labels)
    return dataclasses.replace(batch, targets=targets)


def my_rows(batch: Batch) -> Batch:
    """This rank's share of a global batch."""
    rows, rest = divmod(len(batch.input_ids), dist.get_world_size())
    assert not rest, "rows that no rank would train on"
    return batch.rows(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)


def random_batch(seed: int, rows: int = 8) -> Batch:
    """A random batch of pairs with different lengths and numbers of masked positions."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, rows)
    attention_mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int64)
    masked = rng.integers(1, CAPACITY + 1, rows)
    slots = np.arange(CAPACITY) < masked[:, None]
    positions = rng.integers(1, LENGTH // 2, (rows, CAPACITY))
    labels = rng.integers(5, VOCABULARY, (rows, CAPACITY))
    return Batch(
        input_ids=rng.integers(5, VOCABULARY, (rows, LENGTH)) * attention_mask,
        segment_ids=rng.integers(0, 2, (rows, LENGTH)) * attention_mask,
        attention_mask=attention_mask,
        targets={
            MASKED: Target(np.where(slots, labels, -100), np.where(slots, positions, 0)),
            PAIRS: Target(rng.integers(0, 2, rows)),
        },
        sample_ids=np.arange(rows),
        epochs=np.zeros(rows, np.int64),
    )


def totals_of(batch: Batch) -> dict[InView, Tensor]:
    """Every denominator of a global batch that one process holds, as `Totals`."""
    names = {ATTENDED, ATTENDED_PAIRS, ROWS, *batch.targets}
    return {(DEFAULT_VIEW, name): torch.tensor(float(max(1, count(name, batch)))) for name in names}
