"""Causal pre-training followed by masked, in jobs: ranks, resuming, held-out scores, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs import ConfigError
from tests.conftest import TINY_JOB, tandem
from tests.distributed import run_distributed
from tests.trainer import jobs
from trainer.footprint.demands import demands
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder

STEPS, SWITCH = 8, 4
JOB = [
    f"steps={STEPS}", "data.masking={unit: next_token, copies: 0}", "data.packing=best_fit",
    f"data.phases=[{{from_step: {SWITCH}, masking: {{unit: token, rate: 0.3}}}}]",
    "students.tinybert=null", "students.distilbert.start.teacher=null",
]  # fmt: skip


def stopped_and_resumed(corpus: Path, runs: Path) -> None:
    jobs.finish(jobs.run(jobs.tiny_job(corpus, runs, *JOB, "name=straight")))
    jobs.run(jobs.tiny_job(corpus, runs, *JOB, "name=stopped"), stop_after=SWITCH - 1)
    jobs.run(jobs.tiny_job(corpus, runs, *JOB, "name=stopped"))


def alone(corpus: Path, runs: Path) -> None:
    jobs.run(jobs.tiny_job(corpus, runs, *JOB, "name=alone", "batch.micro_batch=2"))


@pytest.mark.slow
def test_two_ranks_train_as_one_and_resume_exactly_into_the_masks(corpus, tmp_path) -> None:
    run_distributed(stopped_and_resumed, 2, corpus, tmp_path)
    run_distributed(alone, 1, corpus, tmp_path)
    straight, stopped, single = (
        jobs.curve(RunFolder(tmp_path / name)) for name in ("straight", "stopped", "alone")
    )
    assert straight == stopped
    terms = {key for _, key, _ in straight}
    assert {"teacher/mlm", "students/distilbert/soft_kl"} <= terms
    assert jobs.assert_same_losses(RunFolder(tmp_path / "straight"), single) == 2 * STEPS + 4


@pytest.mark.slow
def test_held_out_text_is_scored_by_what_a_phase_predicts(corpus: Path, tmp_path: Path) -> None:
    words = [f"data.path={corpus}", f"output_dir={tmp_path}", "students=null", *JOB[:-2]]
    done = tandem("train", TINY_JOB, *words)
    assert done.returncode == 0, done.stderr
    folder = RunFolder(tmp_path / "tiny")
    scores = {
        row["step"]: {column for key in row if (column := key.rpartition("/")[2]) in COLUMNS}
        for row in metrics.read(folder.metrics)
        if any(key.startswith("val/") for key in row)
    }
    causal, masked = COLUMNS[:2], COLUMNS[2:]
    assert scores == {2: {*causal}, 4: {*causal}, 6: {*masked}, 8: {*masked}}
    told = json.loads(folder.evaluation.read_text())["learners"]["teacher"]["loss"]
    last = [row for row in metrics.read(folder.metrics) if "val/data/teacher/loss" in row][-1]
    assert last["val/data/teacher/loss"] == pytest.approx(told, rel=1e-5)


COLUMNS = ["next_token_loss", "next_token_accuracy", "loss", "accuracy"]

REFUSED = {
    "students.distilbert.objective.value_relation={}": (
        "students.distilbert.objective.value_relation: compares attention in both directions, and "
        "data.masking.unit: next_token has one; remove it"
    ),
    "students={judge: {model: {vocab_size: 600}, generator: teacher, objective: {rtd: {}}}}": (
        "students.judge.generator: replaces masked tokens, and data.masking.unit: next_token masks "
        "none"
    ),
    "students={lstm: {model: {kind: bilstm, vocab_size: 600}, objective: {mlm: {}}}}": (
        "a model of kind bilstm cannot attend to earlier tokens only, as data.masking.unit: "
        "next_token needs"
    ),
    "data.masking.on_device=true": "data.masking.on_device: needs unit: token",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_has_no_meaning_without_masks_is_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        jobs.tiny_job(tmp_path, tmp_path, *JOB, "data.packing=full_sentences", word)
    assert REFUSED[word] in str(refused.value)


@pytest.mark.slow
def test_plans_of_documents_and_of_next_tokens(corpus: Path, tmp_path: Path) -> None:
    """Documents in a row have the products of a whole row; more tokens need more of them."""
    flops, assumed = {}, {}
    for unit in ("token", "next_token"):
        for packing in ("best_fit", "full_sentences"):
            words = [f"data.masking.unit={unit}", f"data.packing={packing}", "students=null"]
            facts = demands(jobs.tiny_job(corpus, tmp_path, *words))
            flops[unit, packing] = facts.learners[0].forward_flops
            assumed[packing] = any("over whole rows" in line for line in facts.assumed)
    assert assumed == {"best_fit": True, "full_sentences": False}
    assert flops["token", "best_fit"] == flops["token", "full_sentences"]
    assert flops["next_token", "best_fit"] == flops["next_token", "full_sentences"]
    assert flops["next_token", "best_fit"] > flops["token", "best_fit"] > 0
