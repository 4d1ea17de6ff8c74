"""The dynamic loss scale as a pure function; test_exactness compares with torch's scaler."""

from __future__ import annotations

import json

import pytest

from trainer.learner_config import LearnerConfig
from trainer.learners.state import BestScore, JobState, LearnerState
from trainer.optimizers.gated import LARGEST, LossScale, LossScaleConfig
from trainer.watch.guard import Guard


def test_it_doubles_after_so_many_good_steps_and_halves_at_once():
    scale = LossScale(8.0)
    seen = []
    for good in (True, True, True, False, True, True, True):
        scale = scale.after_step(growth_interval=3) if good else scale.after_overflow()
        seen.append((scale.value, scale.good_steps))
    assert seen == [(8, 1), (8, 2), (16, 0), (8, 0), (8, 1), (8, 2), (16, 0)]


def test_the_scale_stays_within_the_range_of_float32():
    assert LossScale(LARGEST).after_step(1) == LossScale(LARGEST)
    assert LossScale(2.0).can_shrink
    assert not LossScale(1.0).can_shrink


def test_it_is_part_of_a_checkpoint_as_all_of_a_learners_state_is():
    guard = Guard([2.0, 1.5], "mlm", {"a": [1.0]}, 1, {"spike": 3})
    learner = LearnerState(
        started_at=3,
        tokens=5,
        finished_at=9,
        finished_after=1.5,
        guard=guard,
        loss_scale=LossScale(64.0, 7),
        overflows=2,
        given_heads=["mlm"],
        lead=0.25,
        clocked_from=0.5,
        best=BestScore("accuracy", 0.5, 3),
        idle_steps=1,
    )
    usual, bare = vars(LearnerState(0)), vars(Guard())
    assert not [name for name, value in vars(learner).items() if value == usual[name]]
    assert not [name for name, value in vars(guard).items() if value == bare[name]]
    state = JobState("id", 7, learners={"teacher": learner})
    assert JobState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize("settings", [{"initial": 3.0}, {"initial": 0.5}, {"initial": 2.0**25}])
def test_scales_that_would_round_are_refused(settings):
    with pytest.raises(ValueError, match=r"^initial: "):
        LossScaleConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "int8"}, "precision: must be one of"),
        ({"offload": "disk"}, "offload: must be one of"),
        ({"offload": "optimizer"}, "offload: optimizer needs zero_stage 1 or higher"),
        ({"offload": "parameters", "zero_stage": 2}, "offload: parameters needs zero_stage 3"),
    ],
)
def test_what_no_engine_can_do_is_refused(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        LearnerConfig(**settings)
