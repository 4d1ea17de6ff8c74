"""The time that a run has left, and how durations are written, wherever either is shown."""

import pytest

from configs.progress import duration, seconds_left


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0, "0s"), (59.6, "1m 0s"), (754, "12m 34s"), (11045, "3h 4m"), (183845, "2d 3h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_time_left_is_that_of_the_steps_or_of_the_hours_whichever_is_less():
    assert seconds_left(90, 100, pace=1.0, seconds=90.0, hours=None) == 10.0
    assert seconds_left(90, 100, pace=1.0, seconds=90.0, hours=0.5) == 10.0
    assert seconds_left(90, 100, pace=1.0, seconds=1795.0, hours=0.5) == 5.0
    assert seconds_left(90, 100, pace=1.0, seconds=1900.0, hours=0.5) == 0.0
