"""The test of the seam: a task in one module is trained, distilled, scored and exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import configs
from configs import ConfigError
from data_pipeline import DataError, open_corpora
from tests.distributed import run_distributed
from tests.trainer import jobs
from trainer.config import JobConfig
from trainer.evaluation.finished import SavedLearners
from trainer.job_data.examples import examples_of
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder

LABELS = ["dull", "bright"]
JOB = """
name: moods
steps: 40
output_dir: {runs}
data: {{path: {corpus}, sequence_length: 12}}
batch: {{size: 16, micro_batch: 4}}
teacher:
  model: &model {{hidden_size: 32, layers: 2, heads: 2, ffn_size: 64, vocab_size: 600, max_positions: 12}}
  optimizer: &optimizer {{learning_rate: 3.0e-3}}
  objective:
    sentence_classification: &moods {{train: {folder}/train.tsv, held_out: {folder}/held_out.tsv, labels: [dull, bright]}}
students:
  small:
    model: {{base: bert_base, hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 12}}
    optimizer: *optimizer
    objective: {{sentence_classification: *moods, hidden_mse: {{embedding: false}}}}
evaluation: {{every: 20, sequences: 64}}
checkpoint: {{every: 20}}
log: {{every: 1, wandb: disabled}}
"""  # noqa: E501


def lines(count: int, shift: int) -> list[str]:
    """Texts with their labels: those with "was" in them are bright, those with "his" dull."""
    words = ["the", "of", "and", "to", "in"]
    rows = []
    for number in range(shift, shift + count):
        text = " ".join(words[(number * step) % 5] for step in (1, 2, 3))
        bright = number // 2 % 2
        rows.append(f"{text} {'was' if bright else 'his'} {words[number % 5]}\t{LABELS[bright]}")
    return rows


@pytest.fixture(scope="module")
def job(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("moods")
    (folder / "train.tsv").write_text("\n".join(lines(80, 0)) + "\n")
    (folder / "held_out.tsv").write_text("\n".join(lines(21, 400)) + "\n")
    path = folder / "job.yaml"
    path.write_text(JOB.format(runs=folder / "runs", corpus=corpus, folder=folder))
    return path


def load(job: Path, *overrides: str) -> JobConfig:
    return configs.load(str(job), JobConfig, "job", overrides)


def train(job: Path) -> str:
    """The folder of the finished run. Collective."""
    folder = jobs.run(load(job))
    jobs.finish(folder)
    return str(folder.path)


def test_a_task_in_one_module_is_trained_distilled_scored_and_exported(job) -> None:
    folder = RunFolder(Path(run_distributed(train, 2, job)[0]))
    last = [row for row in metrics.read(folder.metrics) if row["step"] == 40]
    results = json.loads(folder.evaluation.read_text())["learners"]
    score = "sentence_classification_accuracy"
    for learner in ("teacher", "students/small"):
        assert any(f"{learner}/sentence_classification" in row for row in last)
        column = f"val/sentence_classification/{learner}/{score}"
        assert [row[column] for row in last if column in row] == [results[learner][score]]
    assert results["teacher"][score] > 0.9
    texts = [line.rpartition("\t")[0] for line in lines(21, 400)]
    for learner, name in (("teacher", "teacher"), ("students/small", "small")):
        exported = folder.path / "exports" / name
        theirs = AutoModelForSequenceClassification.from_pretrained(exported).eval()
        assert theirs.config.id2label == dict(enumerate(LABELS))
        read = AutoTokenizer.from_pretrained(exported)(texts, return_tensors="pt", padding=True)
        ours = SavedLearners(folder).load(learner)
        with torch.no_grad():
            got = ours(read.input_ids, None, read.attention_mask).heads["sentence_classification"]
            told = theirs(read.input_ids, attention_mask=read.attention_mask).logits
        torch.testing.assert_close(got, told)
        wanted = torch.tensor([LABELS.index(line.rpartition("\t")[2]) for line in lines(21, 400)])
        accuracy = (told.argmax(-1) == wanted).float().mean().item()
        assert accuracy == pytest.approx(results[learner][score])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("teacher.objective.sentence_classification.labels=[a]", "labels: must be two or more"),
        ("teacher.objective.sentence_classification.train=''", "train: must not be empty"),
        ("teacher.objective.mlm={}", "teacher.objective.mlm: is about text, but the job reads"),
    ],
)
def test_what_does_not_fit_is_refused(job, override, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load(job, override)


def test_a_line_without_a_label_is_named(job, tmp_path) -> None:
    (tmp_path / "wrong.tsv").write_text("fine\tdull\nneither\n")
    wrong = f"teacher.objective.sentence_classification.train={tmp_path}/wrong.tsv"
    student = f"students.small.objective.sentence_classification.train={tmp_path}/wrong.tsv"
    config = load(job, wrong, student)
    corpora = open_corpora(config.data)
    with pytest.raises(DataError, match=r"wrong\.tsv:2: must be a text, a tab and one of"):
        examples_of(config, "train", corpora)
