"""Which task each step of a job of several tasks is of."""

from __future__ import annotations

from collections import Counter

import pytest

from data_pipeline import TaskSchedule

SIZES = {"large": 1003, "small": 41, "tiny": 5}
SIZE = 16


def schedule(seed: int = 1) -> TaskSchedule:
    return TaskSchedule(SIZES, seed, SIZE)


@pytest.mark.parametrize("epochs", [1, 2, 7])
def test_every_task_reads_its_examples_once_an_epoch(epochs) -> None:
    """After e epochs a task has had the batches that e passes over its examples begin."""
    found = [schedule().at(step) for step in range(schedule().steps(epochs))]
    counts = Counter(one.task for one in found)
    assert counts == {name: -(-epochs * size // SIZE) for name, size in SIZES.items()}
    for name in SIZES:
        own = [one.batch for one in found if one.task == name]
        assert sorted(own) == own == [*range(len(own))]


def test_the_task_of_a_step_is_a_pure_function_of_seed_and_step() -> None:
    steps = range(schedule().steps(3))
    in_order = [schedule().at(0), *map(schedule().at, steps[1:])]
    one = schedule()
    assert [one.at(step) for step in reversed(steps)] == in_order[::-1]
    assert [schedule(seed=2).at(step) for step in steps] != in_order


def test_tasks_are_mixed_anew_in_every_epoch() -> None:
    first, second = schedule().steps(1), schedule().steps(2)
    tasks = [schedule().at(step).task for step in range(second)]
    assert tasks[:first] != tasks[first : 2 * first]
    halves = Counter(tasks[: first // 2]), Counter(tasks[first // 2 : first])
    assert abs(halves[0]["large"] - halves[1]["large"]) < 8


def test_a_part_of_an_epoch_has_its_part_of_the_steps() -> None:
    one = schedule()
    assert one.steps(0.5) == -(-one.steps(1) // 2)
    assert one.steps(1) < one.steps(1.01) == one.steps(1) + 1
    assert TaskSchedule({"large": 20, "small": 10}, 1, 1).steps(1.1) == 33
