"""Pure functions of the step: learning rates, admission, seeds."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from configs import ConfigError
from trainer.learner_life import BudgetConfig, StartConfig, ThresholdConfig
from trainer.learner_names import derive
from trainer.learners.state import JobState, LearnerState, is_due, is_over, time_used
from trainer.schedules import Linear, factor, schedule_config


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("wsd", [0.5, 1.0, 1.0, 1.0, 1.0, 0.5]),
        ("noam", [0.5, 1.0, 0.816497, 0.707107, 0.632456, 0.577350]),
    ],
)
def test_schedules_by_hand(kind, expected):
    wsd = {"decay_fraction": 0.5} if kind == "wsd" else {}
    config = schedule_config(kind=kind, warmup_steps=2, **wsd)
    assert [factor(config, step, 6) for step in range(6)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", [1.0, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("1-sqrt", [1.0, 1.0, 1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)]),
        ("cosine", [1.0, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_decay_of_wsd_by_hand(shape, expected):
    for settings in ({"decay_steps": 4}, {"decay_fraction": 0.4}):
        config = schedule_config("wsd", decay_shape=shape, min_lr_ratio=0.0, **settings)
        found = [factor(config, step, 10) for step in (0, 5, 6, 7, 8, 9)]
        assert found == pytest.approx(expected, abs=1e-6)
    assert factor(schedule_config("wsd", decay_steps=50), 5, 10) == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"^decay_fraction: set either"):
        schedule_config("wsd", decay_steps=4, decay_fraction=0.4)


@pytest.mark.parametrize("returned", [None, "1", math.nan, math.inf, -0.5, [1.0]])
def test_a_schedule_that_returns_no_fraction_is_refused(monkeypatch, returned):
    """A rate of NaN would be told as a spike of the loss, and a negative one would be used."""
    monkeypatch.setattr(Linear, "fraction", lambda self, progress: returned)
    with pytest.raises(
        ConfigError, match=r"^Linear\.fraction: must return a number of 0 or more, "
    ):
        factor(schedule_config(), 0, 10)
    monkeypatch.setattr(Linear, "fraction", lambda self, progress: np.float32(0.5))
    assert factor(schedule_config(), 0, 10) == 0.5


def test_a_schedule_of_points_is_on_the_lines_between_them_however_long_a_learner_takes():
    config = schedule_config(kind="points", warmup_steps=2, points={2: 1.0, 6: 0.5, 8: 0.0})
    found = [factor(config, step, steps=100, time_used=0.9) for step in (0, 1, 2, 4, 6, 7, 8, 50)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_noam_is_the_formula_of_its_paper_and_needs_a_warm_up():
    """With OpenNMT's learning rate of 2 and width 512."""
    peak = 2 / math.sqrt(512 * 8000)
    config = schedule_config(kind="noam", warmup_steps=8000)
    for step in (0, 99, 7999, 8000, 99_999):
        expected = 2 * 512**-0.5 * min((step + 1) ** -0.5, (step + 1) * 8000**-1.5)
        assert peak * factor(config, step, 10, time_used=0.9) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"^warmup_steps: noam falls"):
        schedule_config(kind="noam")


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "points"},
        {"kind": "points", "points": {-1: 1.0}},
        {"kind": "points", "points": {0: 2.0}},
    ],
)
def test_points_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match=r"^points(\.0)?: "):
        schedule_config(**settings)


def test_a_floor_is_where_a_schedule_ends():
    config = schedule_config(kind="linear", min_lr_ratio=0.1)
    assert factor(config, 0, 10) == 1.0
    assert factor(config, 10, 10) == pytest.approx(0.1)


def test_a_schedule_is_as_far_as_its_steps_or_its_time_whichever_is_more():
    config = schedule_config(warmup_steps=2)
    assert factor(config, 0, 10, time_used=0.25) == pytest.approx(0.5 * 0.75)
    assert factor(config, 6, 10, time_used=0.25) == pytest.approx(0.5)
    assert factor(config, 6, 10, time_used=0.75) == pytest.approx(0.25)
    assert factor(config, 6, 10, time_used=1.5) == 0


def test_time_runs_from_a_learners_start_to_its_own_or_the_jobs_end():
    counters = LearnerState(5, clocked_from=100.0)
    hour = BudgetConfig(hours=1.0)
    assert time_used(hour, counters, 100.0 + 900.0, last=math.inf) == 0.25
    assert time_used(hour, counters, 150.0, last=300.0) == 0.25
    assert time_used(BudgetConfig(), counters, 1e9, last=math.inf) == 0
    assert time_used(hour, LearnerState(5), 1e9, last=math.inf) == 0
    assert not is_over(hour, counters, 9, seconds=3699.0)
    assert is_over(hour, counters, 9, seconds=3700.0)
    counters.finish(9, 3700.0)
    assert is_over(hour, counters, 20, seconds=9000.0)
    assert not is_over(BudgetConfig(hours=1.5), counters, 20, seconds=9000.0)  # was not used up
    assert not is_over(BudgetConfig(steps=5), counters, 20, seconds=9000.0)
    with pytest.raises(ValueError, match="hours: must be positive"):
        BudgetConfig(hours=0.0)


UNIGRAM = {"loss": 6.0, "accuracy": 0.05}
LOSS = StartConfig(teacher=ThresholdConfig("loss", at_most=3.0))
LEAD = StartConfig(teacher=ThresholdConfig("accuracy_over_unigram", at_least=0.1))
PRIMARY = StartConfig(teacher=ThresholdConfig(at_least=0.3))


@pytest.mark.parametrize(
    ("start", "step", "teacher", "due"),
    [
        (StartConfig(), 0, None, True),
        (StartConfig(step=10), 9, None, False),
        (StartConfig(step=10), 10, None, True),
        (LOSS, 50, None, False),
        (LOSS, 50, {"loss": 3.1, "accuracy": 0.3}, False),
        (LOSS, 50, {"loss": 2.9, "accuracy": 0.3}, True),
        (LOSS, 50, {"loss": math.nan, "accuracy": 0.3}, False),
        (LEAD, 50, {"loss": 4.0, "accuracy": 0.149}, False),
        (LEAD, 50, {"loss": 4.0, "accuracy": 0.151}, True),
        (PRIMARY, 50, {"loss": 4.0, "accuracy": 0.29}, False),
        (PRIMARY, 50, {"loss": 4.0, "accuracy": 0.3}, True),
        (PRIMARY, 50, {"pair_accuracy": 0.9}, False),  # its head is not trained
        (dataclasses.replace(LOSS, step=60), 50, {"loss": 2.9, "accuracy": 0.3}, False),
    ],
)
def test_when_a_student_joins(start, step, teacher, due):
    state = JobState("id", step=step, teacher_held_out=teacher)
    assert is_due(start, state, UNIGRAM, "accuracy") is due


def test_state_survives_its_json():
    learners = {"teacher": LearnerState(0), "students/a": LearnerState(5, 1, 700)}
    state = JobState("id", 7, 1000, 3.5, learners, teacher_held_out={"loss": 2.0})
    assert JobState.from_json(state.to_json()) == state
    older = {key: value for key, value in state.to_json().items() if key != "corpora"}
    assert JobState.from_json(older) == state


def test_a_checkpoint_has_the_losses_until_its_step():
    state = JobState("id", held_out={"teacher": [[5, 2.0]]})
    tree = state.to_json()  # which is written while training goes on
    state.held_out["teacher"].append([10, 1.0])
    assert tree["held_out"] == {"teacher": [[5, 2.0]]}


def test_seeds_do_not_collide_by_concatenation():
    assert derive(1, "23") != derive(12, "3")
    assert 0 <= derive("a") < 2**63
