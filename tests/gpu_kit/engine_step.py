"""A step of one learner with as many tensors as BERT-large, and what its engine costs the CPU."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections import defaultdict
from typing import Any, NamedTuple
from unittest import mock

from tests.gpu_kit.counting import Collective, CountedOperators, collectives
from tests.gpu_kit.device import pretend_gpu
from tests.trainer import tiny
from trainer.batch_config import StepShape
from trainer.learner_names import TEACHER
from trainer.learners.learner import Learner
from trainer.objectives import ObjectiveConfig
from trainer.step import train_step
from trainer.tasks.pretraining import MaskedLanguageModelling

# BERT-large's layers, an eighth as wide: matrices are still partitioned at stage 3.
LAYERS, WIDTH = 24, 128
BUCKETS = 7  # that BERT-large's gradients fill
PARTS = ("forward", "backward", "step")  # methods of an engine
WARM_UP, TIMED = 3, 5  # steps


class EngineStep(NamedTuple):
    """The cost of one step of one learner, one micro-batch, on rank 0.

    start: CPU seconds of building the learner; seconds: of a whole step; parts: of the engine's
    methods in it, the model's own computing included; operators: PyTorch's, views included.
    """

    tensors: int
    elements: int
    start: float
    seconds: float
    parts: dict[str, float]
    sent: list[Collective]
    operators: int


def engine_step(stage: int, layers: int = LAYERS) -> EngineStep:
    """Count and time steps on a simulated GPU; times are medians of a few."""
    pretend_gpu()
    began = time.process_time()
    learner = deep_learner(stage, layers)
    start = time.process_time() - began
    batch = tiny.random_batch(1, 2)
    for step in range(WARM_UP):
        train_step(learner, [], batch, step)
    spent: dict[str, list[float]] = defaultdict(list)
    for part in PARTS:
        setattr(learner.engine, part, _timed(getattr(learner.engine, part), spent[part]))
    for step in range(WARM_UP, WARM_UP + TIMED):
        _timed(train_step, spent["whole"])(learner, [], batch, step)
    with collectives() as sent, CountedOperators() as operators:
        train_step(learner, [], batch, WARM_UP + TIMED)
    parameters = list(learner.model.parameters())
    return EngineStep(
        tensors=len(parameters),
        elements=sum(getattr(one, "ds_numel", one.numel()) for one in parameters),
        start=start,
        seconds=statistics.median(spent["whole"]),
        parts={part: statistics.median(spent[part]) for part in PARTS},
        sent=sent,
        operators=operators.count,
    )


def deep_learner(stage: int, layers: int) -> Learner:
    """A teacher of many thin layers, whose gradients fill as many buckets as BERT-large's."""
    encoder = tiny.encoder(
        layers=layers, hidden_size=WIDTH, ffn_size=4 * WIDTH, pooler="none", pair_head=False
    )
    config = dataclasses.replace(
        tiny.learner_configs((stage,) * 3)[TEACHER],
        model=encoder,
        objective=ObjectiveConfig(mlm=MaskedLanguageModelling()),
        precision="bf16",
    )
    bucket = 2 * (6 * layers * WIDTH**2 // BUCKETS)  # DeepSpeed wants an even number
    with mock.patch("trainer.batch_config.LARGEST_BUCKET", bucket):
        return Learner(TEACHER, config, encoder, StepShape(tiny.STEPS, tiny.SEED, 2, 1))


def _timed(call: Any, seconds: list[float]) -> Any:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.process_time()
        result = call(*args, **kwargs)
        seconds.append(time.process_time() - began)
        return result

    return timed
