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
    "tests/trainer/test_tracking.py": 87,
    "tests/trainer/test_footprint.py": 78,
    "tests/trainer/test_exactness.py": 64,
    "tests/configs/test_shipped_jobs.py": 54,
    "tests/model/test_architectures.py": 45,
    "tests/slurm/test_failures.py": 43,
    "tests/trainer/test_sentence_tasks.py": 43,
    "tests/slurm/test_jobs.py": 36,
    "tests/trainer/test_finetune.py": 36,
    "tests/trainer/test_joint_tasks.py": 35,
    "tests/trainer/test_token_tasks.py": 32,
    "tests/test_files_read_back.py": 31,
    "tests/slurm/test_training.py": 27,
    "tests/trainer/test_lifecycle.py": 27,
    "tests/test_job.py": 26,
    "tests/gpu_kit/test_step.py": 26,
    "tests/trainer/checkpoint/test_checkpoint_faults.py": 25,
    "tests/data_pipeline/test_tokenizers.py": 25,
    "tests/faults/test_live_run.py": 25,
    "tests/trainer/test_stored_logits.py": 25,
    "tests/trainer/test_suites.py": 24,
    "tests/gpu_kit/test_compiled.py": 24,
    "tests/trainer/test_prediction.py": 23,
    "tests/model/test_onnx.py": 23,
    "tests/trainer/test_task_distillation.py": 23,
    "tests/trainer/checkpoint/test_checkpoint_learners.py": 23,
    "tests/trainer/test_other_trackers.py": 22,
    "tests/data_pipeline/test_build.py": 21,
    "tests/trainer/test_any_teacher.py": 20,
    "tests/model/test_first_weights.py": 19,
    "tests/trainer/test_vectors.py": 18,
    "tests/trainer/test_frozen_teacher.py": 17,
    "tests/configs/test_shipped.py": 17,
    "tests/trainer/test_step.py": 17,
    "tests/model/test_heads.py": 16,
    "tests/model/test_mechanics.py": 16,
    "tests/data_pipeline/test_stream.py": 16,
    "tests/trainer/test_hub_teachers.py": 16,
    "tests/trainer/test_guard.py": 15,
    "tests/test_dependencies.py": 15,
    "tests/cluster/test_planning.py": 15,
    "tests/trainer/test_ranking_tasks.py": 15,
    "tests/cluster/test_supervisor.py": 14,
    "tests/trainer/test_forks_of_tasks.py": 14,
    "tests/benchmarks/test_study.py": 14,
    "tests/faults/test_one_rank.py": 14,
    "tests/test_init.py": 14,
    "tests/trainer/test_analysis.py": 12,
    "tests/cluster/test_recipes.py": 12,
    "tests/cluster/test_local.py": 12,
    "tests/data_pipeline/test_other_tokens.py": 11,
    "tests/data_pipeline/test_claims.py": 11,
    "tests/cluster/test_set_up.py": 11,
    "tests/trainer/test_other_tokenizers.py": 11,
    "tests/trainer/test_replaced_tokens.py": 11,
    "tests/trainer/test_self_distillation.py": 11,
    "tests/trainer/test_stored_samples.py": 11,
    "tests/data_pipeline/test_corpus_damage.py": 11,
}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, and keep the order of the tests in each."""
    files = [item.nodeid.partition("::")[0] for item in items]
    tests = Counter(files)
    seconds = {file: SECONDS.get(file, SECONDS_OF_A_TEST * tests[file]) for file in tests}
    order = sorted(range(len(items)), key=lambda number: (-seconds[files[number]], files[number]))
    items[:] = [items[number] for number in order]
