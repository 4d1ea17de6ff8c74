"""The FLOPs and memory of a plan, against torch's own counters on the real step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import data_pipeline
from cluster.planning.machine import Machine
from cluster.planning.memory import job_memory
from configs.devices import DeviceConfig
from data_pipeline import Batch, DataConfig, Target
from model import EncoderConfig, describe
from tests.distributed import run_distributed
from trainer.batch_config import BatchConfig, StepShape
from trainer.config import JobConfig
from trainer.footprint.demands import demands, demands_apart
from trainer.footprint.work import Work
from trainer.learner_config import LearnerConfig
from trainer.learner_life import InitConfig
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.objectives import ObjectiveConfig
from trainer.objectives.terms.predictions import FromStudent, SoftKL
from trainer.objectives.terms.states import Cosine, HiddenMSE
from trainer.step import train_step
from trainer.tasks.pretraining import MaskedLanguageModelling, ReplacedTokenDetection

RANKS, LENGTH, VOCABULARY, MASKED = 2, 64, 2000, 9
# (teacher, half, narrow) stages, sequences of a micro-batch, micro-batches of a step.
CASES = [
    ((3, 2, 0), 16, 1, "fp32", "bf16_weights"),
    *(((0, 0, 0), 16, 1), ((1, 1, 1), 8, 2), ((1, 2, 3), 8, 2), ((3, 2, 1), 16, 1)),
    *(((2, 0, 3), 16, 1), ((2, 0, 3), 16, 1, "bf16"), ((0, 1, 2), 8, 2, "bf16")),
    ((2, 0, 1), 8, 2, "fp32", "bf16_weights"),
]
RTD_STAGES = [(0, 0), (2, 2), (0, 3), (3, 0), (3, 3)]  # of a detector and its generator


def job(
    stages: tuple[int, int, int] = (0, 0, 0),
    micro_batch: int = 16,
    passes: int = 1,
    communication: str = "fp32",
    precision: str = "fp32",
):
    def learner(model, objective, stage):
        how = {"communication": communication, "precision": precision}
        return LearnerConfig(model, objective, zero_stage=stage, **how)

    def encoder(**changes):
        sizes = {"hidden_size": 192, "layers": 2, "heads": 4, "ffn_size": 768}
        return EncoderConfig(**{**sizes, "vocab_size": VOCABULARY, "max_positions": 64, **changes})

    mlm = MaskedLanguageModelling()
    half = ObjectiveConfig(mlm=mlm, soft_kl=SoftKL(), cosine=Cosine())
    narrow = ObjectiveConfig(mlm=mlm, hidden_mse=HiddenMSE())
    return JobConfig(
        name="job",
        steps=10,
        data=DataConfig(path="none", sequence_length=LENGTH),
        batch=BatchConfig(size=RANKS * micro_batch * passes, micro_batch=micro_batch),
        teacher=learner(encoder(), ObjectiveConfig(mlm=mlm), stages[0]),
        students={
            "half": learner(encoder(layers=1), half, stages[1]),
            "narrow": learner(encoder(hidden_size=96), narrow, stages[2]),
        },
    )


def batch(rows: int) -> Batch:
    """Random rows without padding."""
    rng = np.random.default_rng(0)
    ids = rng.integers(5, VOCABULARY, (rows, LENGTH))
    positions = np.tile(np.arange(1, 1 + MASKED), (rows, 1))
    labels = rng.integers(5, VOCABULARY, (rows, MASKED))
    number = np.arange(rows)
    targets = {data_pipeline.MASKED: Target(labels, positions)}
    return Batch(ids, ids * 0, ids * 0 + 1, targets, number, number)


def rtd_job(teacher_stage: int, generator_stage: int) -> JobConfig:
    """A detector of replaced tokens and its generator; most of their parameters are words."""

    def model(**sizes) -> EncoderConfig:
        shape = {"hidden_size": 192, "layers": 2, "heads": 4, "max_positions": 64}
        return EncoderConfig(vocab_size=10 * VOCABULARY, **shape, **sizes)

    detects = ObjectiveConfig(rtd=ReplacedTokenDetection())
    fills = ObjectiveConfig(mlm=MaskedLanguageModelling())
    reads = {"generator": "generator", "embedding_sharing": "disentangled"}
    return dataclasses.replace(
        job(),
        teacher=LearnerConfig(model(ffn_size=768), detects, zero_stage=teacher_stage, **reads),
        students={
            "generator": LearnerConfig(model(ffn_size=192), fills, zero_stage=generator_stage)
        },
    )


def most_bytes(config: JobConfig) -> float:
    """The peak bytes of tensors while engines are built and take two steps."""
    rows = config.batch.size // RANKS
    step_shape = StepShape(10, 0, config.batch.micro_batch, rows // config.batch.micro_batch)
    named = {TEACHER: config.teacher, **{student_key(n): c for n, c in config.students.items()}}
    with Work() as live:
        learners = [Learner(n, c, config.teacher.model, step_shape) for n, c in named.items()]
        for step in range(2):
            train_step(learners[0], learners[1:], batch(rows), step)
    return live.peak


JOBS = [*(job(*case) for case in CASES), *(rtd_job(*stages) for stages in RTD_STAGES)]


def measured() -> list[float]:
    """The peak bytes of each job on this rank."""
    return [most_bytes(config) for config in JOBS]


def planned(config: JobConfig) -> float:
    """The bytes that a plan expects at most."""
    device = DeviceConfig(1.0, {"fp32": 1.0}, 1.0, 1.0, 1.0)
    machine = Machine(device, gpus_per_node=RANKS, overlaps=False)
    return job_memory(demands(config, device="cpu"), machine).peak


@pytest.mark.slow
def test_planned_memory_is_within_a_tenth_of_what_tensors_take_on_two_ranks():
    found = np.array(run_distributed(measured, RANKS)).max(axis=0)
    expected = np.array([planned(config) for config in JOBS])
    np.testing.assert_allclose(expected, found, rtol=0.1)


@pytest.mark.parametrize("packing", ["full_sentences", "best_fit"])
def test_flops_of_a_teacher_are_those_of_its_model(packing):
    """Also where rows hold several documents: an MFU of `metrics.jsonl` is of whole rows too."""
    config = job()
    facts = demands(
        dataclasses.replace(config, data=dataclasses.replace(config.data, packing=packing))
    )
    size = describe(config.teacher.model, LENGTH, MASKED / LENGTH)
    counted = facts.learners[0].forward_flops + facts.learners[0].backward_flops
    assert counted == pytest.approx(size.flops_per_token * LENGTH, rel=0.01)
    assert (facts.rows, facts.length) == (32, LENGTH)


def test_demands_of_phases_starts_and_frozen_teachers():
    config = job()
    phase = dataclasses.replace(config.data, phases=[_phase(4, 32)])
    config = dataclasses.replace(config, data=phase)
    config.students["half"].start.step = 5
    facts = demands(config)
    _, half, narrow = facts.learners
    assert facts.length == pytest.approx(0.4 * 64 + 0.6 * 32)
    assert (half.active, narrow.active) == (0.5, 1.0)
    shorter = demands(dataclasses.replace(config, data=DataConfig(path="x", sequence_length=32)))
    assert shorter.learners[2].forward_flops < narrow.forward_flops < _narrow_flops(64)


def test_a_learner_apart_costs_what_it_costs_in_a_job_with_a_frozen_teacher():
    """Measured in a real job with one student, which shares the teacher's outputs with no other."""
    config = job()
    config.students["narrow"].objective.soft_kl = SoftKL()
    joint = demands(config).learners
    teacher, *students = demands_apart(config, joint)
    init = InitConfig(pretrained="finished")
    frozen = LearnerConfig(config.teacher.model, ObjectiveConfig(), init=init, frozen=True)
    for name, student in zip(config.students, students, strict=True):
        one = dataclasses.replace(config, teacher=frozen, students={name: config.students[name]})
        read, alone = demands(one).learners
        for ours, counted in ((teacher, read), (student, alone)):
            for key in ("forward_flops", "backward_flops", "trained", "zero_stage"):
                assert getattr(ours, key) == pytest.approx(getattr(counted, key)), (name, key)
    assert students[1].forward_flops > joint[2].forward_flops  # it was not the first to ask


def test_a_teacher_that_learns_from_a_student_runs_it_forward():
    config = job()
    advice = FromStudent(student="half")
    two_way = dataclasses.replace(config.teacher.objective, from_student=advice)
    advised = dataclasses.replace(config.teacher, objective=two_way)
    (alone, *students), (both, *same) = (
        demands(dataclasses.replace(config, teacher=one)).learners
        for one in (config.teacher, advised)
    )
    half = describe(config.students["half"].model, LENGTH, MASKED / LENGTH)
    unread = 2 * (LENGTH - MASKED) * (192 * 192 + 2 * 192 * 768)  # behind its last attention
    more = both.forward_flops - alone.forward_flops
    assert more == pytest.approx(half.flops_per_token * LENGTH / 3 - unread, rel=0.01)
    assert both.backward_flops == alone.backward_flops
    assert same == students


def test_a_frozen_encoder_has_no_backward_pass():
    config = job()
    frozen = dataclasses.replace(config.teacher, encoder="frozen")
    (whole, *_), (heads, *_) = (
        demands(dataclasses.replace(config, teacher=one, students={})).learners
        for one in (config.teacher, frozen)
    )
    size = describe(config.teacher.architecture)
    assert heads.trained == size.head_parameters + 192 * 192 + 192  # and the pooler
    assert heads.forward_flops == pytest.approx(whole.forward_flops, rel=0.05)
    assert heads.backward_flops < 0.01 * whole.backward_flops


def _narrow_flops(length: int) -> float:
    config = dataclasses.replace(job(), data=DataConfig(path="x", sequence_length=length))
    return demands(config).learners[2].forward_flops


def _phase(step: int, length: int):
    from data_pipeline.config import PhaseConfig

    return PhaseConfig(from_step=step, sequence_length=length)
