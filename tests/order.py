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
    "tests/slurm/test_failures.py": 56,
    "tests/trainer/test_exactness.py": 48,
    "tests/slurm/test_jobs.py": 37,
    "tests/trainer/test_finetune.py": 33,
    "tests/trainer/test_self_distillation.py": 32,
    "tests/slurm/test_stages.py": 32,
    "tests/trainer/checkpoint/test_checkpoint_learners.py": 30,
    "tests/trainer/test_c_mlm.py": 30,
    "tests/trainer/test_suites.py": 28,
    "tests/configs/test_shipped_jobs.py": 27,
    "tests/trainer/test_token_tasks.py": 27,
    "tests/trainer/test_several_teachers.py": 27,
    "tests/test_files_read_back.py": 26,
    "tests/trainer/test_joint_tasks.py": 25,
    "tests/trainer/test_sentence_tasks.py": 24,
    "tests/trainer/test_footprint.py": 24,
    "tests/trainer/test_teacher_budget.py": 23,
    "tests/faults/test_live_run.py": 23,
    "tests/data_pipeline/test_tokenizers.py": 22,
    "tests/trainer/test_listening.py": 22,
    "tests/model/test_onnx.py": 22,
    "tests/trainer/test_tracking.py": 22,
    "tests/slurm/test_training.py": 20,
    "tests/trainer/test_labels_of_texts.py": 20,
    "tests/gpu_kit/test_compiled.py": 20,
    "tests/trainer/test_kinds_of_models.py": 19,
    "tests/trainer/test_job_data.py": 19,
    "tests/trainer/test_ranking_tasks.py": 19,
    "tests/trainer/test_step.py": 19,
    "tests/trainer/test_stored_logits.py": 18,
    "tests/test_errors.py": 18,
    "tests/trainer/test_teachers_of_tasks.py": 18,
    "tests/faults/test_one_rank.py": 18,
    "tests/trainer/test_stacking.py": 18,
    "tests/cluster/test_recipes.py": 17,
    "tests/data_pipeline/test_build.py": 17,
    "tests/trainer/test_progressive.py": 16,
    "tests/gpu_kit/test_step.py": 15,
    "tests/trainer/test_lifecycle.py": 15,
    "tests/trainer/checkpoint/test_checkpoint_faults.py": 14,
    "tests/trainer/test_task_distillation.py": 14,
    "tests/trainer/test_prediction.py": 14,
    "tests/test_job.py": 14,
    "tests/trainer/test_guard.py": 14,
    "tests/data_pipeline/test_corpus_damage.py": 13,
    "tests/faults/test_kills.py": 12,
    "tests/trainer/test_frozen_teacher.py": 12,
    "tests/benchmarks/test_study.py": 12,
    "tests/trainer/test_device.py": 12,
    "tests/test_dependencies.py": 12,
    "tests/trainer/test_pages.py": 11,
    "tests/trainer/test_ways_to_run.py": 11,
    "tests/trainer/test_gauges.py": 11,
    "tests/trainer/test_independence.py": 11,
    "tests/trainer/test_agreement.py": 10,
    "tests/trainer/test_recovery.py": 10,
    "tests/trainer/test_best_checkpoints.py": 10,
    "tests/test_entries.py": 10,
    "tests/data_pipeline/test_merge.py": 10,
    "tests/model/test_mechanics.py": 10,
}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, and keep the order of the tests in each."""
    files = [item.nodeid.partition("::")[0] for item in items]
    tests = Counter(files)
    seconds = {file: SECONDS.get(file, SECONDS_OF_A_TEST * tests[file]) for file in tests}
    order = sorted(range(len(items)), key=lambda number: (-seconds[files[number]], files[number]))
    items[:] = [items[number] for number in order]
