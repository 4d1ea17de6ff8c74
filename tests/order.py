"""Long test files run first, so that no worker is left with one at the end.

A worker of pytest-xdist takes a whole file at a time (``--dist loadfile``). By default xdist begins
with the files that have the most tests, so a file with one long test would come last and the other
workers would wait for it. ``--no-loadscope-reorder`` makes it keep the order of collection, which
is set here.
"""

from __future__ import annotations

from collections import Counter

import pytest

SECONDS_OF_A_TEST = 0.1  # in a file that is not listed
# About how long a file takes without its slow tests: seconds of processor time, and of SLURM's
# files, which wait more than they compute, estimates. A file belongs here from ten seconds on.
SECONDS = {
    "tests/slurm/test_jobs.py": 120,
    "tests/slurm/test_training.py": 60,
    "tests/slurm/test_failures.py": 60,
    "tests/trainer/test_stored_logits.py": 60,
    "tests/faults/test_kills.py": 46,
    "tests/trainer/test_exactness.py": 45,
    "tests/trainer/test_footprint.py": 44,
    "tests/trainer/test_joint_tasks.py": 40,
    "tests/trainer/test_self_distillation.py": 40,
    "tests/trainer/test_teachers_of_tasks.py": 40,
    "tests/configs/test_shipped_jobs.py": 31,
    "tests/test_errors.py": 29,
    "tests/faults/test_live_run.py": 27,
    "tests/trainer/test_lifecycle.py": 25,
    "tests/trainer/checkpoint/test_checkpoint_learners.py": 20,
    "tests/trainer/checkpoint/test_checkpoint_kinds.py": 17,
    "tests/trainer/test_ways_to_run.py": 15,
    "tests/faults/test_one_rank.py": 13,
    "tests/trainer/test_independence.py": 12,
    "tests/trainer/test_tracking.py": 12,
    "tests/test_job.py": 11,
    "tests/trainer/checkpoint/test_checkpoint_elastic.py": 12,
}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, and keep the order of the tests in each."""
    files = [item.nodeid.partition("::")[0] for item in items]
    tests = Counter(files)
    seconds = {file: SECONDS.get(file, SECONDS_OF_A_TEST * tests[file]) for file in tests}
    order = sorted(range(len(items)), key=lambda number: (-seconds[files[number]], files[number]))
    items[:] = [items[number] for number in order]
