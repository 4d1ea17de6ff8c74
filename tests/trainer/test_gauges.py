"""Measurements of a run: time, bytes, out-of-memory errors, slow ranks, MFU."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import configs
from configs.devices import DeviceConfig
from data_pipeline import DEFAULT_VIEW, DataConfig, MaskingConfig
from model import describe
from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer import measure
from trainer.config import JobConfig, LogConfig
from trainer.control import Requests
from trainer.errors import TrainingError
from trainer.learner_config import LearnerConfig
from trainer.learner_life import InitConfig
from trainer.learner_names import BACKWARD, COMMUNICATION, FORWARD, STEP
from trainer.learners import engine, learner
from trainer.learners.engine import named_for
from trainer.learners.state import JobState
from trainer.measure import ProfileConfig, watch_collectives
from trainer.record.gauges import Gauges, SlowRanks, known_device, seconds_at_peak, slow_among
from trainer.record.recorder import Recorder, models_table
from trainer.run_folder.folder import RunFolder
from trainer.step import StepResult, train_step

A_MINUTE = 60.0  # slow even on a machine whose other rank waits for a core


def measured(folder: str):
    """Four logged steps on each rank; the last rank's teacher is slow from the second step on."""
    learners = tiny.learners((0, 1, 3), micro_batch=2, accumulation=2)
    watch_collectives()
    teacher = learners[0]
    config = JobConfig("job", DataConfig(path="none", packing="segment_pair"), teacher.config, 4)
    meters = Gauges(config, RunFolder(Path(folder)), attempt=3, device=torch.device("cpu"))
    rows, said, late = [], [], [0.0]
    clock = time.perf_counter
    measure.time = SimpleNamespace(perf_counter=lambda: clock() + sum(late))
    for step in range(4):
        meters.before(step, is_logged=True)
        train_step(teacher, learners[1:], tiny.my_rows(tiny.random_batch(step)), step)
        row, lines = meters.read(step + 1, 100.0, learners)
        rows, said = [*rows, row], [*said, *lines]
        if step == 0 and dist.get_rank() == 1:
            teacher.engine.module.register_forward_pre_hook(lambda *_: late.append(A_MINUTE))
    named = (Path(folder) / "slow_ranks.json").read_text() if dist.get_rank() == 0 else ""
    meters.before(4, is_logged=False)
    train_step(teacher, learners[1:], tiny.my_rows(tiny.random_batch(4)), 4)
    unlogged, _ = meters.read(5, 100.0, learners)
    sizes = [sum(p.numel() for p in learner.model.parameters()) for learner in learners]
    return rows, said, unlogged, sizes, named


def test_parts_bytes_and_a_slow_rank_on_two_ranks(tmp_path):
    results = run_distributed(measured, 2, str(tmp_path))
    rows, said, unlogged, sizes, named = results[0]
    for name in ("teacher", "students/distilbert", "students/tinybert"):
        assert {
            f"{name}/seconds_{part}" for part in (FORWARD, BACKWARD, STEP, COMMUNICATION)
        } <= rows[0].keys()
    # Gradients are reduced once, whole, at stage 0; at stage 1 the parameters are gathered besides.
    assert rows[1]["teacher/bytes_communication"] == pytest.approx(4 * sizes[0], rel=0.02)
    gathered = rows[1]["students/distilbert/bytes_communication"]
    assert gathered == pytest.approx(8 * sizes[1], rel=0.02)
    assert rows[1]["restarts"] == 2
    assert results[1][0][1]["teacher/seconds_forward"] > 2 * A_MINUTE
    assert rows[1]["slowest_rank"] > 1.5
    assert not any("seconds_" in key for key in unlogged)
    (line,) = said
    assert line.startswith("rank 1 on ")
    assert json.loads(named)[0]["says"].startswith("rank 1")


def test_a_slow_rank_is_named_once_and_forgotten_when_it_recovers(tmp_path):
    file = tmp_path / "slow_ranks.json"
    ranks = SlowRanks(["a", "b", "c"], file)
    said = [ranks.update(step, [1.0, 1.0, 2.0]) for step in range(5)]
    assert said == [[], [], ["rank 2 on c is slow: it computes 2.0 times as long"], [], []]
    assert json.loads(file.read_text())[0]["step"] == 2
    assert ranks.update(5, [1.0, 1.1, 1.0]) == []
    assert not file.exists()
    assert [ranks.update(step, [1.0, 1.0, 2.5]) for step in range(6, 12)] == [[]] * 6
    assert "2.5 times" in file.read_text(), "shown while it is slow, but said once"


def test_a_slow_rank_is_printed_and_logged_once(tmp_path, capfd, caplog):
    class Gauges:
        def read(self, *_):
            return {}, ["rank 1 on n2 is slow"]

        def close(self):
            pass

    teacher = tiny.learner_configs((0, 0, 0))["teacher"]
    quiet = LogConfig(every=1, wandb="disabled")
    config = JobConfig(
        "job", DataConfig(path="none", packing="segment_pair"), teacher, 4, log=quiet
    )
    terminal = logging.StreamHandler()  # as a rank's warnings go to the terminal
    terminal.setLevel(logging.WARNING)
    logging.getLogger().addHandler(terminal)
    caplog.set_level(logging.INFO)
    with Recorder(
        config, RunFolder(tmp_path), JobState("id"), Gauges(), b"", speaks=True
    ) as recorder:
        result = StepResult({}, {}, {DEFAULT_VIEW: 8}, 8, 0, Requests(), 0.0, {})
        recorder.step(JobState("id", step=1), result, [], [], 0.0)
    logging.getLogger().removeHandler(terminal)
    printed = capfd.readouterr()
    assert (printed.out + printed.err).count("is slow") == 1
    assert sum("is slow" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("busy", "slow"),
    [([1.0], set()), ([1, 2], {1}), ([0.0, 0.0], set()), ([1, 1, 1.4, 1.6], {3})],
)
def test_who_is_slow(busy, slow):
    assert slow_among(busy) == slow


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),  # of the driver, not of torch's allocator
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        MemoryError(),
    ],
)
def test_running_out_of_memory_names_the_learner_and_what_to_do(error):
    config = tiny.learner_configs((0, 0, 0))["teacher"]
    with (
        pytest.raises(TrainingError) as raised,
        named_for("students.tiny", config, "backward", micro_batch=8),
    ):
        raise error
    words = str(raised.value)
    assert words.startswith("students.tiny: out of memory in its backward; try ")
    for remedy in ("batch.micro_batch=4", "students.tiny.zero_stage=1", "checkpoint_activations"):
        assert remedy in words


def test_a_frozen_teacher_gets_advice_that_it_can_take():
    config = LearnerConfig(frozen=True, init=InitConfig(pretrained="a"))
    with pytest.raises(TrainingError) as raised, named_for("teacher", config, "forward", 1):
        raise MemoryError
    words = "teacher: out of memory in its forward; try teacher.zero_stage=3, or more GPUs"
    assert str(raised.value).startswith(words)


def test_a_learner_too_large_to_begin_is_named(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(engine, "start_engine", full)
    config = tiny.learner_configs((0, 0, 0))["teacher"]
    step_shape = learner.StepShape(1, seed=0, micro_batch=8, accumulation=1)
    with pytest.raises(TrainingError) as raised:
        learner.Learner("students/a", config, config.model, step_shape)
    words = "students.a: out of memory in its beginning; try students.a.zero_stage=1, or more GPUs"
    assert str(raised.value).startswith(words)


def test_other_errors_pass():
    config = tiny.learner_configs((0, 0, 0))["teacher"]
    with pytest.raises(RuntimeError, match="shape"), named_for("teacher", config, "forward", 1):
        raise RuntimeError("shape mismatch")


def test_mfu_is_model_flops_over_the_peak():
    h100 = configs.load("h100", DeviceConfig, "device")
    teacher = tiny.learner_configs((0, 0, 0))["teacher"]
    data = DataConfig(path="x", sequence_length=16)
    size = describe(teacher.model, 16, 0.15)
    seconds = seconds_at_peak([teacher], data, 0, h100)
    assert seconds == pytest.approx(size.flops_per_token / 494.7e12)
    next_tokens = replace(data, masking=MaskingConfig(unit="next_token"))
    seconds = seconds_at_peak([teacher], next_tokens, 0, h100)
    assert seconds == pytest.approx(describe(teacher.model, 16, 1.0).flops_per_token / 494.7e12)
    assert known_device(torch.device("cpu")) is None


def test_trackers_are_told_the_flops_at_the_masks_of_the_job():
    job = configs.load("demo", JobConfig, "job", ["data.masking.rate=0.4"])
    teacher, *_ = models_table(job)
    size = describe(job.teacher.architecture, 128, 0.4)
    assert teacher["mflops_per_token"] == pytest.approx(size.flops_per_token / 1e6, abs=1e-3)


def test_a_span_of_steps():
    assert ProfileConfig("5:7").span == (5, 7)
    assert ProfileConfig().span is None


@pytest.mark.parametrize("steps", ["5", "5:5", "a:b", "5:4"])
def test_a_span_of_steps_that_is_none_is_refused(steps):
    with pytest.raises(ValueError, match=r"^steps: must be two steps"):
        ProfileConfig(steps)
