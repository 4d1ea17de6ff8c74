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
# About how long a file takes without its slow tests: seconds, on two cores and beside two other
# workers. A file belongs here from ten seconds on.
SECONDS = {
    "tests/data_pipeline/test_tokenizers.py": 41,
    "tests/gpu_kit/test_compiled.py": 35,
    "tests/faults/test_live_run.py": 34,
    "tests/trainer/test_exactness.py": 30,
    "tests/trainer/test_prediction.py": 28,
    "tests/configs/test_shipped_jobs.py": 22,
    "tests/test_dependencies.py": 19,
    "tests/data_pipeline/test_build.py": 18,
    "tests/cluster/test_supervisor.py": 18,
    "tests/trainer/test_vectors.py": 17,
    "tests/model/test_heads.py": 17,
    "tests/model/test_architectures.py": 17,
    "tests/slurm/test_training.py": 17,
    "tests/slurm/test_failures.py": 17,
    "tests/trainer/test_any_teacher.py": 17,
    "tests/trainer/test_token_tasks.py": 16,
    "tests/test_job.py": 16,
    "tests/slurm/test_jobs.py": 15,
    "tests/trainer/test_tracking.py": 15,
    "tests/trainer/checkpoint/test_checkpoint_faults.py": 14,
    "tests/configs/test_shipped.py": 14,
    "tests/data_pipeline/test_packing.py": 14,
    "tests/benchmarks/test_study.py": 14,
    "tests/trainer/test_lifecycle.py": 13,
    "tests/configs/test_reference.py": 13,
    "tests/model/test_mechanics.py": 12,
    "tests/faults/test_one_rank.py": 12,
    "tests/trainer/test_suites.py": 12,
    "tests/data_pipeline/test_stream.py": 12,
    "tests/trainer/test_sentence_tasks.py": 12,
    "tests/model/test_first_weights.py": 11,
    "tests/test_init.py": 11,
    "tests/gpu_kit/test_step.py": 11,
    "tests/trainer/checkpoint/test_checkpoint_learners.py": 11,
    "tests/trainer/test_fake_tensors.py": 11,
    "tests/trainer/test_labelled_files.py": 10,
    "tests/trainer/test_finetune.py": 10,
    "tests/trainer/test_hub_teachers.py": 10,
}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, and keep the order of the tests in each."""
    files = [item.nodeid.partition("::")[0] for item in items]
    tests = Counter(files)
    seconds = {file: SECONDS.get(file, SECONDS_OF_A_TEST * tests[file]) for file in tests}
    order = sorted(range(len(items)), key=lambda number: (-seconds[files[number]], files[number]))
    items[:] = [items[number] for number in order]
