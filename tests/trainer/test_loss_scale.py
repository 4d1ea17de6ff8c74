"""The dynamic loss scale as a pure function; test_exactness compares with torch's scaler."""

from __future__ import annotations

import pytest

from trainer.learner_config import LearnerConfig
from trainer.learners.state import JobState, LearnerState
from trainer.optimizers.loss_scale import LARGEST, LossScale, LossScaleConfig


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


def test_it_is_part_of_a_checkpoint():
    learners = {"teacher": LearnerState(0, overflows=2, loss_scale=LossScale(64.0, 7))}
    state = JobState("id", 7, learners=learners)
    assert JobState.from_json(state.to_json()) == state


@pytest.mark.parametrize("settings", [{"initial": 3.0}, {"initial": 0.5}, {"initial": 2.0**25}])
def test_scales_that_would_round_are_refused(settings):
    with pytest.raises(ValueError, match=r"^initial: "):
        LossScaleConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp8"}, "precision: must be one of"),
        ({"offload": "disk"}, "offload: must be one of"),
        ({"offload": "optimizer"}, "offload: optimizer needs zero_stage 1 or higher"),
        ({"offload": "parameters", "zero_stage": 2}, "offload: parameters needs zero_stage 3"),
    ],
)
def test_what_no_engine_can_do_is_refused(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        LearnerConfig(**settings)
