"""Context extension: a phase with longer sequences and another rotary base, a fork, a new run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model import from_pretrained, read_config
from tests.distributed import run_distributed
from tests.trainer.jobs import curve, finish, run, tiny_job
from trainer.evaluation.export import export_learner
from trainer.evaluation.finished import SavedLearners
from trainer.job_data.fit import require_inputs
from trainer.lifecycle.forking import fork
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder

STEPS, BASE = 6, 160000.0
ROTARY = "{positions: rotary, segment_types: 0, global_rope_theta: 10000, max_positions: 32}"
JOB = [
    f"steps={STEPS}", "data.sequence_length=16", f"teacher.model={ROTARY}", "checkpoint.keep=9",
    f"students.distilbert.model={ROTARY}", "students.distilbert.start={}", "students.tinybert=null",
    "students.distilbert.init={}", "data.masking.copies=0",
    "teacher.objective.from_student={student: distilbert}",
    f"data.phases=[{{from_step: 3, sequence_length: 32, rope_theta: {BASE}, batch: 4, "
    "masking: {rate: 0.3}}]",
]  # fmt: skip
STAGES = ["teacher.zero_stage=3", "students.distilbert.zero_stage=1"]


def extended(corpus: Path, runs: Path) -> None:
    finish(run(tiny_job(corpus, runs, "name=straight", *JOB, *STAGES)))
    for step in (2, 4, None):
        run(tiny_job(corpus, runs, "name=stopped", *JOB, *STAGES), stop_after=step)


def begun(corpus: Path, runs: Path) -> None:
    run(tiny_job(corpus, runs, "name=moved", *JOB, *STAGES), stop_after=2)


def on_one_rank(corpus: Path, runs: Path) -> None:
    run(tiny_job(corpus, runs, "name=moved", *JOB))


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phases")
    run_distributed(extended, 2, corpus, folder)
    return folder


@pytest.mark.slow
def test_a_run_resumes_exactly_into_a_longer_context(runs):
    straight = RunFolder(runs / "straight")
    assert curve(RunFolder(runs / "stopped")) == curve(straight)


@pytest.mark.slow
def test_a_run_resumes_into_a_longer_context_on_other_ranks_and_stages(runs, corpus):
    straight = RunFolder(runs / "straight")
    run_distributed(begun, 2, corpus, runs)
    run_distributed(on_one_rank, 1, corpus, runs)
    moved = curve(RunFolder(runs / "moved"))
    assert [one[:2] for one in moved] == [one[:2] for one in curve(straight)]
    values = [one[2] for one in moved], [one[2] for one in curve(straight)]
    assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("learner", ["teacher", "students/distilbert"])
def test_an_export_has_the_base_with_which_its_weights_were_trained(runs, tmp_path, learner):
    folder = RunFolder(runs / "straight")
    assert read_config(folder.export(learner)).global_rope_theta == BASE
    rows = [row for row in metrics.read(folder.metrics) if row["step"] == STEPS]
    told = json.loads(folder.evaluation.read_text())["learners"][learner]["loss"]
    assert metrics.held_out(rows[-1], learner, "loss") == pytest.approx(told, rel=1e-5)
    export_learner(SavedLearners(folder, which=2), "teacher", tmp_path / "early")
    assert read_config(tmp_path / "early").global_rope_theta == 10000


@pytest.mark.slow
def test_the_base_turns_the_positions(runs):
    model = from_pretrained(RunFolder(runs / "straight").export("teacher"))
    ids = torch.randint(10, 500, (2, 32))
    states = model(ids).logits
    model.set_rope_theta(500.0)
    assert not torch.allclose(model(ids).logits, states)


@pytest.mark.slow
def test_a_fork_and_a_new_run_extend_the_context_of_a_trained_model(runs, corpus, tmp_path):
    longer = ["teacher.model.max_positions=64", "teacher.model.global_rope_theta=1e6"]
    made = fork(RunFolder(runs / "straight"), 2, "longer", longer)
    assert not made.begin_anew
    export = runs / "straight" / "exports" / "teacher"
    new = tiny_job(
        corpus, tmp_path, "students=null", f"teacher.init.pretrained={export}",
        "teacher.model=null", f"teacher.model={{base: {export}/model.yaml, max_positions: 64}}",
        "teacher.model.global_rope_theta=1e6", "data.sequence_length=64",
    )  # fmt: skip
    require_inputs(new)
    turning = ["data.phases=[{from_step: 3, rope_theta: 1e6}]"]
    with pytest.raises(ValueError, match=r"data.phases\[0\].rope_theta: no model that is trained"):
        tiny_job(corpus, tmp_path, "teacher.model.positions=learned", "students=null", *turning)


def pairs_and_then_documents(corpus: Path, runs: Path) -> list[float]:
    words = [
        "steps=3",
        "students=null",
        "teacher.objective.nsp={}",
        "teacher.model.segment_types=2",
    ]
    data = ["data.packing=segment_pair", "data.phases=[{from_step: 1, packing: documents}]"]
    others = ["teacher.model.pooler=tanh", "batch.micro_batch=3"]
    values = curve(run(tiny_job(corpus, runs, *words, *data, *others)))
    return [value for _, name, value in values if name == "teacher/nsp"]


def test_pairs_may_give_way_to_documents_of_which_a_row_holds_several(corpus, tmp_path):
    ((first, *others),) = run_distributed(pairs_and_then_documents, 1, corpus, tmp_path)
    assert first > 0
    assert others == [0, 0]
