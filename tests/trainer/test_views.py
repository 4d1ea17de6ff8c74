"""Students that read a part of what their teacher reads, or its two texts apart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import configs
from data_pipeline import Corpus, ExampleSplit
from model import from_pretrained
from tests.conftest import tandem
from tests.distributed import run_distributed
from tests.trainer import jobs
from tests.trainer.jobs import tiny_job
from trainer.checkpoint.reader import Checkpoint
from trainer.config import JobConfig
from trainer.job_data.examples import views_of, with_examples
from trainer.run_folder.folder import RunFolder

# The label is in the second text alone: the teacher, which reads both, can learn it.
JOB = """
name: pairs
steps: 6
output_dir: {folder}/runs
data:
  {{root: {folder}, train: train.tsv, validation: held_out.tsv, sequence_length: 16,
  tokenizer: {corpus}/tokenizer}}
batch: {{size: 8, micro_batch: 2}}
teacher:
  model: &model
    {{hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 16}}
  objective: {{sentence_pair: {{}}}}
students:
  part:
    model: *model
    view: first
    objective: {{sentence_pair: {{}}, soft_labels: {{temperature: 2.0}}}}
  whole: {{model: *model, objective: {{sentence_pair: {{}}, soft_labels: {{}}}}}}
  siamese:
    model: {{kind: bilstm, siamese: true, hidden_size: 16, pooled_size: 8, vocab_size: 600}}
    objective: {{sentence_pair: {{weight: 0.0}}, soft_labels: {{loss: mse}}}}
evaluation: {{every: 3}}
checkpoint: {{every: 3}}
log: {{every: 1, wandb: disabled}}
"""
WORDS = ["the", "of", "and", "to", "in", "was", "his"]


def rows(count: int, shift: int, second: str = "") -> list[str]:
    found = ["text_a\ttext_b\tlabel"]
    for number in range(shift, shift + count):
        first = " ".join(WORDS[(number * step) % 7] for step in range(1, 2 + number % 4))
        found.append(f"{first}\t{second or WORDS[number % 5]}\t{number // 3 % 2}")
    return found


def write(folder: Path, second: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.tsv").write_text("\n".join(rows(40, 0, second)) + "\n")
    (folder / "held_out.tsv").write_text("\n".join(rows(13, 100, second)) + "\n")
    return folder


def load(folder: Path, corpus: Path, *overrides: str) -> JobConfig:
    text = JOB.format(folder=folder, corpus=corpus)
    return with_examples(configs.load_text(text, JobConfig, "job", overrides, "job.yaml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("views"))


def train(folder: Path, corpus: Path, *overrides: str) -> list[tuple[float, str, float]]:
    run = jobs.run(load(folder, corpus, *overrides))
    if not overrides:
        jobs.finish(run)
    return jobs.curve(run)


def trained_twice(folder: Path, other: Path, corpus: Path) -> list[list]:
    """With two second texts: the student that reads the first ones learns from labels alone."""
    alone = ["students.part.objective.soft_labels=null"]
    return [train(one, corpus, "name=alone", *alone) for one in (folder, other)]


@pytest.fixture(scope="module")
def curve(folder, corpus) -> list[tuple[float, str, float]]:
    return run_distributed(train, 2, folder, corpus)[0]


def test_a_view_holds_the_first_text_with_its_own_padding(folder, corpus) -> None:
    job = load(folder, corpus)
    split = ExampleSplit(Corpus.open(job.data.path), "train", views=views_of(job, "", job.seed))
    batch = split.batch(np.arange(3), np.zeros(3, np.int64))
    texts = [line.split("\t")[0] for line in rows(3, 0)[1:]]
    read = AutoTokenizer.from_pretrained(corpus / "tokenizer")(texts, padding=True)
    first = batch.view("first")
    assert first.input_ids.tolist() == read["input_ids"]
    assert first.attention_mask.tolist() == read["attention_mask"]
    assert not first.segment_ids.any()
    assert batch.segment_ids.any()
    assert first.targets["sentence_pair"].labels.tolist() == [0, 0, 0]
    half = batch.rows(0, 1).trimmed()
    assert half.view("first").input_ids.shape[1] == sum(read["attention_mask"][0])
    none = batch.without_labels(np.array([True, False, False]))
    assert none.view("first").targets["sentence_pair"].is_labelled.tolist() == [False, True, True]


@pytest.mark.slow
def test_two_ranks_train_and_score_as_one_does(curve, folder, corpus, tmp_path) -> None:
    (alone,) = run_distributed(train, 1, folder, corpus, f"output_dir={tmp_path}")
    both = {(step, key): value for step, key, value in curve}
    compared = [one for one in alone if one[1].endswith(("/loss", "/soft_labels", "_accuracy"))]
    terms = {f"students/{name}/soft_labels" for name in ("part", "siamese")}
    assert {key for _, key, _ in compared} >= {*terms, "teacher/loss"}
    for step, key, value in compared:
        assert both[step, key] == pytest.approx(value, rel=1e-5), (step, key)


@pytest.mark.slow
def test_tokens_are_those_that_a_learner_reads(curve, folder) -> None:
    checkpoints = RunFolder(folder / "runs" / "pairs").checkpoints
    learners = Checkpoint(checkpoints, 6).trainer_state["learners"]
    tokens = {name: one["tokens"] for name, one in learners.items()}
    second_texts = 2 * 6 * 8  # a word and [SEP] in each row
    assert tokens["students/whole"] == tokens["teacher"]
    assert tokens["students/part"] == tokens["teacher"] - second_texts
    shares = [value for _, key, value in curve if key == "padding"]
    assert len(shares) == 6
    assert all(0 <= share < 0.5 for share in shares), "each rank's rows have a length of their own"


@pytest.mark.slow
def test_the_student_depends_on_its_own_text_only(folder, corpus, tmp_path) -> None:
    other = write(tmp_path / "other", second="his his was")
    (found,) = run_distributed(trained_twice, 1, folder, other, corpus)
    ours, theirs = ([one for one in curve if "students/part" in one[1]] for curve in found)
    assert len(ours) > 30
    assert ours == theirs
    assert [one for one in found[0] if one[1] == "teacher/loss"] != [
        one for one in found[1] if one[1] == "teacher/loss"
    ]


@pytest.mark.slow
def test_its_export_predicts_from_the_first_text(curve, folder, corpus, tmp_path) -> None:
    run = RunFolder(folder / "runs" / "pairs")
    export = run.exports / "part"
    assert json.loads((export / "task.json").read_text())["fields"] == ["text_a"]
    table = tmp_path / "texts.tsv"
    texts = [line.split("\t")[0] for line in rows(13, 100)[1:]]
    table.write_text("\n".join(["text_a", *texts]) + "\n")
    done = tandem("predict", export, table)
    assert done.returncode == 0, done.stderr
    read = AutoTokenizer.from_pretrained(export)(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        outputs = from_pretrained(export)(read.input_ids, None, read.attention_mask)
    logits = outputs.heads["sentence_pair"]
    told = [json.loads(line)["label"] for line in done.stdout.splitlines()]
    assert told == [str(one) for one in logits.argmax(-1).tolist()]
    right = [line.split("\t")[2] for line in rows(13, 100)[1:]]
    accuracy = sum(ours == theirs for ours, theirs in zip(told, right, strict=True)) / 13
    learners = json.loads(run.evaluation.read_text())["learners"]
    assert learners["students/part"]["sentence_pair_accuracy"] == pytest.approx(accuracy)


@pytest.mark.slow
def test_a_siamese_export_predicts_from_both_texts(curve, folder, tmp_path) -> None:
    export = RunFolder(folder / "runs" / "pairs").exports / "siamese"
    table = tmp_path / "pairs.tsv"
    table.write_text("\n".join(rows(13, 100)) + "\n")
    done = tandem("predict", export, table)
    assert done.returncode == 0, done.stderr
    texts = [line.split("\t")[:2] for line in rows(13, 100)[1:]]
    read = AutoTokenizer.from_pretrained(export)(*zip(*texts, strict=True), padding=True)
    inputs = [torch.tensor(read[key]) for key in ("input_ids", "token_type_ids", "attention_mask")]
    with torch.no_grad():
        likely = from_pretrained(export)(*inputs).heads["sentence_pair"].softmax(-1)
    told = [json.loads(line)["probabilities"]["1"] for line in done.stdout.splitlines()]
    assert told == pytest.approx(likely[:, 1].tolist(), abs=1e-5)
    one_text = tmp_path / "texts.txt"
    one_text.write_text("a film\n")
    embedded = tandem("embed", export, one_text)
    assert embedded.returncode == 0, embedded.stderr
    vector = json.loads(embedded.stdout)["vector"]
    assert len(vector) == from_pretrained(export).config.hidden_size


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("students.part.view=third", "students.part.view: the data have no view 'third'; there ar"),
        ("students.part.objective.hidden_mse={}", "hidden_mse: compares states, so that its teac"),
        ("students.siamese.view=first", "students.siamese.model: compares two texts; give its obj"),
    ],
)
def test_what_does_not_fit_is_refused(folder, corpus, override, reason) -> None:
    with pytest.raises(configs.ConfigError) as failed:
        load(folder, corpus, override)
    assert reason in str(failed.value)


def test_text_has_no_views_and_is_no_pair(corpus, tmp_path) -> None:
    with pytest.raises(configs.ConfigError, match=r"no view 'first'; there are: default"):
        tiny_job(corpus, tmp_path, "students.tinybert.view=first")
    siamese = "students.two={model: {kind: bilstm, siamese: true}, objective: {mlm: {}}}"
    with pytest.raises(configs.ConfigError, match=r"students.two.model: compares two texts"):
        tiny_job(corpus, tmp_path, siamese)
