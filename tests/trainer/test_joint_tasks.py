"""Several tasks in one job (MT-DNN): a task in each step, a head for each, one encoder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import configs
from configs import ConfigError
from data_pipeline import DataError, TaskSchedule
from data_pipeline.shards import manifest
from model import from_pretrained
from tests.conftest import tandem
from tests.distributed import run_distributed
from tests.failing import one_line
from tests.trainer import jobs
from tests.trainer.test_sentence_tasks import lines, write
from tests.trainer.test_token_tasks import conll
from trainer.checkpoint.attempts import Owner
from trainer.config import JobConfig
from trainer.control import RunContext
from trainer.errors import TrainingError
from trainer.evaluation.finished import SavedLearners
from trainer.job import Job
from trainer.job_data.examples import with_examples
from trainer.lifecycle.continuity import accepted_changes
from trainer.lifecycle.start import start_run
from trainer.measure import Startup
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder
from trainer.step import train_step

EXAMPLES = {"moods": 40, "names": 24, "alike": 20}
EPOCHS, STOP = 2, 6
JOB = """
name: several
epochs: {epochs}
output_dir: {folder}/runs
tasks: {{moods: single_sentence, names: tagging, alike: {folder}/alike.yaml}}
data:
  root: {folder}
  tokenizer: {corpus}/tokenizer
  tasks:
    moods:
      {{train: moods.tsv, validation: moods_dev.tsv, test: moods_dev.tsv, sequence_length: 16}}
    names: {{train: names, validation: names_dev, sequence_length: 16}}
batch: {{size: 8, micro_batch: 4}}
teacher:
  model: &model
    {{hidden_size: 32, layers: 2, heads: 2, ffn_size: 64, vocab_size: 600, max_positions: 16}}
  optimizer: &optimizer {{learning_rate: 3.0e-3}}
  schedule: {{warmup_steps: 0}}
  masked_only: true
students:
  small:
    model:
      {{hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 16}}
    optimizer: *optimizer
    zero_stage: 2
    objective:
      soft_labels: {{weight: 0.5}}
      tasks: {{moods: {{single_sentence: {{weight: 0.5}}}}}}
  cut:
    model:
      {{hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 16}}
    optimizer: *optimizer
    zero_stage: 3
evaluation: {{every: 7}}
checkpoint: {{every: 100}}
log: {{every: 1, wandb: disabled}}
"""
ALIKE = """
base: sentence_pair
name: alike
data: {train: alike.tsv, validation: alike_dev.tsv, sequence_length: 12}
teacher: {objective: {sentence_pair: {target: number}}}
"""


def pairs(count: int, shift: int) -> str:
    """Two texts that are alike, 1, or not, 0."""
    words = ["the", "of", "and", "to", "in"]
    rows = ["text_a\ttext_b\tlabel"]
    for number in range(shift, shift + count):
        one = words[number % 5]
        rows.append(f"{one} was\t{one if number % 3 else 'his'} was\t{float(number % 3 > 0)}")
    return "\n".join(rows) + "\n"


@pytest.fixture(scope="module", name="job")
def job_of_several(corpus, tmp_path_factory) -> Path:
    return write_job(tmp_path_factory.mktemp("several"), corpus)


def write_job(folder: Path, corpus: Path) -> Path:
    """The job and its examples."""
    write(folder / "moods.tsv", lines(EXAMPLES["moods"], 0))
    write(folder / "moods_dev.tsv", lines(12, 400))
    (folder / "names").write_text(conll(EXAMPLES["names"], 0))
    (folder / "names_dev").write_text(conll(9, 300))
    (folder / "alike.tsv").write_text(pairs(EXAMPLES["alike"], 0))
    (folder / "alike_dev.tsv").write_text(pairs(9, 300))
    (folder / "alike.yaml").write_text(ALIKE)
    path = folder / "job.yaml"
    path.write_text(JOB.format(folder=folder, corpus=corpus, epochs=EPOCHS))
    return path


def load(job: Path, *overrides: str) -> JobConfig:
    return with_examples(configs.load(str(job), JobConfig, "job", overrides))


def trained(job: Path) -> None:
    """Run the job to its end. Collective."""
    jobs.finish(jobs.run(load(job)))


def stopped_and_resumed(job: Path) -> list:
    """The curve of a run that was stopped in the middle of an epoch. Collective."""
    jobs.run(load(job, "name=again"), stop_after=STOP)
    return jobs.curve(jobs.run(load(job, "name=again")))


@pytest.fixture(scope="module", name="of_two")
def several_of_two(corpus, shared) -> RunFolder:
    """The finished run of two ranks."""
    folder = shared(
        "several", lambda folder: run_distributed(trained, 2, write_job(folder, corpus))
    )
    return RunFolder(folder / "runs" / "several")


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_last_bit(of_two, job) -> None:
    whole = jobs.curve(of_two)
    assert len(whole) > 300
    assert run_distributed(stopped_and_resumed, 2, job)[0] == whole


def alone(job: Path) -> list:
    return jobs.curve(jobs.run(load(job, "name=alone")))


@pytest.mark.slow
def test_two_ranks_train_as_one_does(of_two, job) -> None:
    ours = {(step, name): value for step, name, value in run_distributed(alone, 1, job)[0]}
    whole = jobs.curve(of_two)
    assert ours.keys() == {(step, name) for step, name, _ in whole}
    for step, name, value in whole:
        if name.endswith("/loss"):
            assert ours[step, name] == pytest.approx(value, rel=2e-3, abs=1e-4), (step, name)


@pytest.mark.slow
def test_each_step_is_of_one_task(of_two) -> None:
    run = of_two
    schedule = TaskSchedule(EXAMPLES, 0, 8)
    rows = [row for row in metrics.read(run.metrics) if "teacher/loss" in row]
    assert len(rows) == schedule.steps(EPOCHS)
    for step, row in enumerate(rows):
        task = schedule.at(step).task
        for learner, terms in {"teacher": "{}", "students/small": "soft_labels_{}"}.items():
            there = [name for name in EXAMPLES if f"{learner}/{terms.format(name)}" in row]
            assert there == [task]
        weight = 0.5 if task == "moods" else 1.0
        ours = [row[f"students/small/{term}"] for term in (task, f"soft_labels_{task}")]
        assert row["students/small/loss"] == pytest.approx(weight * ours[0] + 0.5 * ours[1])


@pytest.mark.slow
def test_every_task_is_scored_by_its_own_metrics(of_two) -> None:
    run = of_two
    results = json.loads(run.evaluation.read_text())
    for learner in ("teacher", "students/small", "students/cut"):
        scores = results["learners"][learner]
        assert scores["moods_accuracy"] is not None
        assert scores["names_entity_f1"] is not None
        assert scores["alike_pearson"] is not None
        assert scores["test_moods_accuracy"] == scores["moods_accuracy"]
        assert set(scores["corpora"]) == set(EXAMPLES)
    assert results["columns"][0]["name"] == results["metric"] == "task_mean"
    headings = {column["name"]: column["heading"] for column in results["columns"]}
    assert headings["moods_accuracy"] == "moods accuracy"
    assert headings["test_moods_accuracy"] == "test moods accuracy"
    primary = ("moods_accuracy", "names_entity_f1", "alike_pearson")
    for scores in results["learners"].values():
        assert scores["task_mean"] == pytest.approx(sum(scores[one] for one in primary) / 3)
        assert "test_task_mean" not in scores  # only moods has a test file
        teacher = results["learners"]["teacher"]["task_mean"]
        assert scores["retention"] == pytest.approx(scores["task_mean"] / teacher)
    saved = json.loads((SavedLearners(run).checkpoint.path / "trainer.json").read_text())
    teacher = results["learners"]["teacher"]["task_mean"]
    assert saved["scores"]["teacher"]["value"] == pytest.approx(
        teacher, rel=1e-3
    )  # by which checkpoints are kept
    assert not any(column["name"].startswith("test_names") for column in results["columns"])
    (last,) = [
        row for row in metrics.read(run.metrics) if "val/moods/teacher/moods_accuracy" in row
    ][-1:]
    assert "val/moods/teacher/names_entity_f1" not in last
    assert last["val/tasks/teacher/task_mean"] == saved["scores"]["teacher"]["value"]


@pytest.mark.slow
def test_each_head_alone_is_a_model_of_transformers(of_two, tmp_path) -> None:
    run = of_two
    whole = from_pretrained(run.path / "exports" / "teacher")
    assert set(whole.config.task_heads) == set(EXAMPLES)
    ours = SavedLearners(run).load("teacher")
    kinds = {
        "moods": AutoModelForSequenceClassification,
        "alike": AutoModelForSequenceClassification,
        "names": AutoModelForTokenClassification,
    }
    for name, kind in kinds.items():
        out = tmp_path / name
        made = tandem("export", run.path, "--learner", "teacher", "--head", name, "--out", out)
        assert made.returncode == 0, made.stderr
        theirs = kind.from_pretrained(out).eval()
        read = AutoTokenizer.from_pretrained(out)(["of the Monday was"], return_tensors="pt")
        with torch.no_grad():
            told = theirs(read.input_ids).logits
            torch.testing.assert_close(ours(read.input_ids).heads[name], told)
            torch.testing.assert_close(whole(read.input_ids).heads[name], told)


@pytest.mark.slow
def test_predictions_name_the_head(of_two, job, tmp_path) -> None:
    exported = of_two.path / "exports" / "teacher"
    unclear = tandem("predict", exported, job.parent / "moods_dev.tsv")
    assert "choose one with --head: alike, moods, names" in one_line(unclear.stderr)
    wrong = tandem("predict", exported, job.parent / "moods_dev.tsv", "--head", "x")
    words = ("--learner", "teacher", "--head", "x", "--out", tmp_path / "x")
    for ended in (wrong, tandem("export", of_two.path, *words)):
        assert ended.returncode == 2
        assert one_line(ended.stderr).startswith("tandem: --head: ")
        assert " has no head x; there are: " in ended.stderr
    for head, file, key in (("moods", "moods_dev.tsv", "label"), ("names", "names_dev", "tags")):
        told = tandem("predict", exported, job.parent / file, "--head", head)
        assert told.returncode == 0, told.stderr
        assert all(key in json.loads(line) for line in told.stdout.splitlines())


def changes(job: Path, runs: Path) -> list[tuple[str, list[str]]]:
    """Of each step its task, and the parts of the model that changed, moments or weights."""
    config = load(job, f"output_dir={runs}", "students=null")
    attempt = start_run(config, Owner.here()).attempt
    around = RunContext.of(config, attempt, dist.get_rank(), lambda: False, Startup())
    found = []
    with Job(config, torch.device("cpu"), around) as one:
        teacher = one.learners.teacher
        for step in range(12):
            before = dict(state_of(teacher.engine))
            result = train_step(teacher, [], one.batches.take(), step)
            after = dict(state_of(teacher.engine))
            changed = [part for part, state in after.items() if state != before[part]]
            found.append((next(iter(result.terms["teacher"])), changed))
    return found


def state_of(engine) -> Iterator[tuple[str, list]]:
    """The weights and moments of the heads and of the pooler."""
    for part in (*(f"task_heads.{name}." for name in EXAMPLES), "pooler."):
        tensors = []
        for name, parameter in engine.module.model.named_parameters():
            if name.startswith(part):
                tensors += [parameter, *engine.optimizer.state.get(parameter, {}).values()]
        yield part, [tensor.tolist() for tensor in tensors]


@pytest.mark.slow
def test_a_step_leaves_the_heads_of_other_tasks_as_they_are(job, tmp_path) -> None:
    steps = run_distributed(changes, 1, job, tmp_path)[0]
    assert {task for task, _ in steps} == set(EXAMPLES)
    for task, changed in steps:
        pooled = [] if task == "names" else ["pooler."]
        assert changed == [f"task_heads.{task}.", *pooled]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tasks.other=nothing"], "tasks.other: nothing: no such task config"),
        (["tasks.other={a: 1}"], "tasks.other: must be a name of configs/task, or a file"),
        (["tasks.other=single_sentence"], "data.tasks.other.train: must be set"),
        (["tasks.train=alike"], "no such task config"),
        (["tasks.items=sst2"], "teacher.objective.tasks.items: that name is taken"),
        (["tasks.training=sst2"], "teacher.objective.tasks.training: that name is taken"),
        (
            ["tasks.of-two=sst2"],
            "tasks: a key must be made of letters, digits and _, and begin with no",
        ),
        (
            ["teacher.objective.tasks.moods.single_sentence.head_name=mine"],
            "objective.tasks.moods.single_sentence.head_name: the head has the name of the task",
        ),
        (
            ["teacher.objective.tasks.moods.single_sentence.layers=[1]"],
            "students.small.objective.tasks.moods.single_sentence: must have the settings of "
            "teacher.objective.tasks.moods.single_sentence, except",
        ),
        (
            ["teacher.objective.branches={}"],
            "teacher.objective.branches: is for tasks with classes, and names has a head of kind",
        ),
        (["tasks.moods_two=sst2"], "begins with another task's name and _"),
        (["data.train=moods.tsv"], "data.tasks: have examples of their own"),
        (["data.tasks.moods.train=''"], "data.tasks.moods.validation: is for a task's examples"),
        (["data.validation_fraction=0.2"], "data.validation_fraction: is for a task's examples"),
        (["teacher.objective.tasks.moods.tagging={}"], "tasks.moods: must have one of"),
        (["teacher.objective.mlm={}"], "objective.mlm: is about text, but the job reads the"),
        (["students.small.objective.single_sentence={}"], "objective.tasks: must be those of data"),
        (
            ["students.small.objective.soft_labels.tasks=[x]"],
            "soft_labels: needs the task beside it",
        ),
        (["data.tasks.more={train: a}"], "objective.tasks: must be those of data.tasks"),
        (["batch.tokens=100", "batch.size=null"], "a task's batch has one size"),
    ],
)
def test_what_does_not_fit_is_refused(job, overrides, message) -> None:
    with pytest.raises(ConfigError) as refused:
        configs.load(str(job), JobConfig, "job", overrides)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_setting_that_changes_the_examples_of_a_task_is_named(job) -> None:
    section = "objective.tasks.moods.single_sentence.skip_malformed"
    keys = [f"teacher.{section}", f"students.small.{section}", f"students.cut.{section}"]
    before, now = (
        configs.load(str(job), JobConfig, "job", [f"{key}={value}" for key in keys])
        for value in ("false", "true")
    )
    read, present = ({"data.tasks.moods.path": content} for content in "ab")
    with pytest.raises(TrainingError, match=rf"^teacher\.{section}: false -> true: "):
        accepted_changes(before, now, read=read, present=present, step=4)


@pytest.mark.slow
def test_bad_examples_are_named_with_their_task(job, tmp_path) -> None:
    write(tmp_path / "one.tsv", ["fine\tdull", "x\tdull"])
    with pytest.raises(DataError, match=r"one\.tsv: has only one label"):
        load(job, f"data.tasks.moods.train={tmp_path / 'one.tsv'}")
    found = load(job)
    assert load(job, "name=other").data == found.data
    path = found.data.tasks["moods"].path
    with pytest.raises(DataError, match=r"data\.tasks\.names\.path: .* holds other examples"):
        load(job, f"data.tasks.names.path={path}")


def test_a_resolved_job_is_the_job(job) -> None:
    found = load(job)
    again = configs.load_text(configs.dump(found), JobConfig, "job", [], "config.yaml")
    assert again == found == with_examples(again)
    assert found.steps == TaskSchedule(EXAMPLES, 0, 8).steps(EPOCHS)
    assert found.teacher.objective.terms()["moods"].labels == ["bright", "dull"]
    assert found.students["small"].objective.terms()["moods"].weight == 0.5


@pytest.mark.slow
def test_a_frozen_teacher_needs_the_heads_that_it_teaches(of_two, job) -> None:
    exported = of_two.path / "exports" / "teacher"
    frozen = ["teacher=null", f"teacher.init.pretrained={exported}", "teacher.frozen=Yes"]
    found = load(job, *frozen)
    assert set(found.teacher.model.task_heads) == set(EXAMPLES)
    more = [f"tasks.more={job.parent}/alike.yaml"]
    with pytest.raises(TrainingError, match="it has no head for more, but for "):
        load(job, *frozen, *more)
    assert load(job, *frozen, *more, "students.small.objective.soft_labels.tasks=[moods]")


@pytest.mark.slow
def test_a_dump_and_a_show_of_several_tasks(job, tmp_path) -> None:
    out = tmp_path / "rows.npz"
    done = tandem("data", "dump", job, "--steps", "0:3", "--out", out)
    assert done.returncode == 0, done.stderr
    assert f"24 examples are in {out}" in done.stdout
    schedule = TaskSchedule(EXAMPLES, 0, 8)
    with np.load(out) as found:
        assert found["task"].tolist()[::8] == [schedule.at(step).task for step in range(3)]
    shown = tandem("data", "show", job, "--samples", "1")
    assert shown.returncode == 0, shown.stderr
    for name, count in EXAMPLES.items():
        assert f"{name}\n{count} examples to train on" in shown.stdout


@pytest.mark.slow
def test_a_job_of_several_tasks_is_planned_and_submitted(job) -> None:
    for words in (["plan", job, "--json"], ["submit", job, "--dry-run"]):
        done = tandem(*words)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_without_tasks_there_is_one_line(tmp_path) -> None:
    ended = tandem("finetune", "multi_task", "--model", tmp_path)
    assert ended.returncode == 1
    assert "epochs: are for examples: name data.train, or tasks" in one_line(ended.stderr)


@pytest.mark.slow
def test_the_examples_of_an_older_version_are_known(job, monkeypatch) -> None:
    found, read = load(job), manifest.read

    def older(folder: Path) -> dict[str, object]:
        tree = read(folder)
        return {**tree, "identity": {**tree["identity"], "code": "of the task's module"}}

    monkeypatch.setattr(manifest, "read", older)
    paths = [f"data.tasks.{name}.path={one.path}" for name, one in found.data.tasks.items()]
    assert load(job, *paths) == found
