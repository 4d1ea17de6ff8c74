"""Several labels of a text, each right or not by itself, and weights of classes in the loss."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import configs
import tandem
from data_pipeline import DataError
from tests.conftest import tandem as in_a_fork
from tests.distributed import run_distributed
from tests.trainer import jobs
from trainer.config import JobConfig
from trainer.footprint.footprint import footprints_and_passes
from trainer.job_data.examples import with_examples
from trainer.objectives.labels import binary_cross_entropy, label_cross_entropy
from trainer.run_folder.folder import RunFolder
from trainer.tasks.sentences import SentenceTerm, SingleSentence

LABELS = ["dull", "long", "new"]
JOB = """
name: labels
steps: 30
output_dir: {folder}/runs
data: {{root: {folder}, train: train.jsonl, validation: dev.jsonl, sequence_length: 12,
  tokenizer: {corpus}/tokenizer}}
batch: {{size: 8, micro_batch: 3}}
teacher:
  model: {{hidden_size: 32, layers: 1, heads: 2, ffn_size: 64, vocab_size: 600, max_positions: 12}}
  optimizer: {{learning_rate: 5.0e-3}}
  objective: {{single_sentence: {settings}}}
students:
  small:
    model:
      {{hidden_size: 16, layers: 1, heads: 2, ffn_size: 32, vocab_size: 600, max_positions: 12}}
    objective: {{single_sentence: {settings}, soft_labels: {{}}}}
evaluation: {{every: 1000}}
checkpoint: {{every: 1000}}
log: {{every: 1, wandb: disabled}}
"""
ALL = "{target: labels, metrics: [micro_f1, macro_f1, accuracy, exact_match]}"
WEIGHTED = "{class_weights: {the: 0.02, of: 0.3}}"


def write(path: Path, count: int, shift: int, several: bool) -> None:
    words = ["the", "of", "and", "to", "in", "that", "was"]
    rows = []
    for number in range(shift, shift + count):
        labels = [label for bit, label in enumerate(LABELS) if number >> bit & 1]
        text = " ".join([words[number % 7], *(words[2 + LABELS.index(one)] for one in labels)])
        rows.append({"text": text, "label": labels if several else words[number % 3]})
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


def job_in(folder: Path, corpus: Path, settings: str, several: bool) -> Path:
    folder.mkdir()
    write(folder / "train.jsonl", 64, 0, several)
    write(folder / "dev.jsonl", 21, 100, several)
    path = folder / "job.yaml"
    path.write_text(JOB.format(folder=folder, corpus=corpus, settings=settings))
    return path


def train(path: Path, name: str, *more: str) -> tuple[str, list]:
    """The folder of the finished run, and its curve. Collective."""
    overrides = [f"name={name}", *(["batch.micro_batch=8"] if name == "whole" else []), *more]
    folder = jobs.run(with_examples(configs.load(str(path), JobConfig, "job", overrides)))
    jobs.finish(folder)
    return str(folder.path), jobs.curve(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "several"), [(ALL, True), pytest.param(WEIGHTED, False, marks=pytest.mark.slow)]
)
def test_two_ranks_learn_as_one_does(corpus, tmp_path, settings: str, several: bool) -> None:
    path = job_in(tmp_path / "job", corpus, settings, several)
    (run, ours), _ = run_distributed(train, 2, path, "two")
    ((_, whole),) = run_distributed(train, 1, path, "whole")
    values = losses(ours)
    assert values == pytest.approx(losses(whole), rel=1e-3)
    assert len(values) >= 60
    assert sum(values[-10:]) < sum(values[:10])
    if several:
        check_scores_and_export(RunFolder(Path(run)), tmp_path / "job" / "dev.jsonl")


def losses(curve: list) -> list[float]:
    return [value for _, name, value in curve if name.endswith("/single_sentence")]


def test_lists_of_labels_are_learned(corpus, tmp_path) -> None:
    """Each label goes with a word, which is in no text without the label."""
    path = job_in(tmp_path / "job", corpus, ALL, several=True)
    for part in ("train", "dev"):
        file = tmp_path / "job" / f"{part}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            row["text"] = " ".join(["was", *row["text"].split()[1:]])
        file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    more = ["steps=200", "students=null", "teacher.model.initializer_range=0.2"]
    ((run, _),) = run_distributed(train, 1, path, "whole", *more)
    scores = json.loads(RunFolder(Path(run)).evaluation.read_text())["learners"]["teacher"]
    assert scores["single_sentence_micro_f1"] > 0.95
    assert scores["single_sentence_exact_match"] > 0.9


@pytest.mark.parametrize(("settings", "several"), [(ALL, True), ("{}", False)])
def test_labels_are_shown_by_their_names(corpus, tmp_path, settings: str, several: bool) -> None:
    path = job_in(tmp_path / "job", corpus, settings, several)
    ended = CliRunner().invoke(tandem.main, ["data", "show", str(path)])
    assert ended.exit_code == 0, ended.output
    lines = (tmp_path / "job" / "train.jsonl").read_text().splitlines()
    shown = ended.stdout.splitlines()
    places = [place for place, line in enumerate(shown) if line.startswith("example ")]
    assert len(places) == 4
    for place in places:
        label = json.loads(lines[int(shown[place].split()[1])])["label"]
        wanted = ", ".join(label) if several else label
        assert shown[place + 2].strip() == f"single_sentence: {wanted}".strip()


def test_lists_of_labels_are_planned(corpus, tmp_path) -> None:
    path = job_in(tmp_path / "job", corpus, ALL, several=True)
    more = [f"batch.micro_batch={len(LABELS) + 1}"]
    job = with_examples(configs.load(str(path), JobConfig, "job", more))
    needs = footprints_and_passes(job, "gpu", 12)[0]
    assert needs["teacher"].forward_flops > needs["students/small"].forward_flops > 0


def check_scores_and_export(run: RunFolder, dev: Path) -> None:
    from sklearn.metrics import accuracy_score, f1_score

    rows = [json.loads(line) for line in dev.read_text().splitlines()]
    exported = run.path / "exports" / "teacher"
    model = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    assert model.config.problem_type == "multi_label_classification"
    assert [*model.config.id2label.values()] == LABELS
    texts = [row["text"] for row in rows]
    read = AutoTokenizer.from_pretrained(exported)(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = model(read.input_ids, attention_mask=read.attention_mask).logits
    predicted = (logits > 0).int().numpy()
    right = [[int(label in row["label"]) for label in LABELS] for row in rows]
    scores = json.loads(run.evaluation.read_text())["learners"]["teacher"]
    wanted = {
        "micro_f1": f1_score(right, predicted, average="micro"),
        "macro_f1": f1_score(right, predicted, average="macro"),
        "exact_match": accuracy_score(right, predicted),
        "accuracy": (predicted == right).mean(),
    }
    assert {name: scores[f"single_sentence_{name}"] for name in wanted} == pytest.approx(wanted)
    ended = CliRunner().invoke(tandem.main, ["predict", str(exported), str(dev)])
    told = [json.loads(line)["labels"] for line in ended.stdout.splitlines()]
    by_row = [[LABELS[at] for at in range(3) if row[at]] for row in predicted]
    assert told == by_row, ended.stderr


def test_weights_are_those_of_torch() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, -100, 1, 0])
    weights = [0.5, 1.0, 4.0]
    loss, count = label_cross_entropy(logits, labels, weights)
    wanted = torch.nn.CrossEntropyLoss(weight=torch.tensor(weights))(logits, labels)
    torch.testing.assert_close(loss / count, wanted)
    several = torch.tensor([[0, 1, 1], [1, 0, 0]])
    loss, count = binary_cross_entropy(logits[:2], several)
    wanted = torch.nn.BCEWithLogitsLoss()(logits[:2], several.float())
    torch.testing.assert_close(loss / count, wanted)


def test_weights_are_not_rounded_to_the_precision_of_the_outputs() -> None:
    task = SingleSentence(labels=["a", "b"], class_weights={"a": 0.3})
    outputs, labels = torch.zeros(3, 2, dtype=torch.bfloat16), torch.tensor([0, 0, 1])
    features = SimpleNamespace(heads={task.head: outputs})
    batch = SimpleNamespace(row_labels={task.head: labels}.get)
    loss, count = SentenceTerm(task)(SimpleNamespace(features=features, batch=batch))
    assert float(count) == pytest.approx(1.6)  # 0.3 is 0.3008 in bfloat16
    assert float(loss) == pytest.approx(1.6 * math.log(2))


def test_the_shipped_yaml_runs(corpus, tmp_path) -> None:
    job_in(tmp_path / "job", corpus, ALL, several=True)
    words = [f"data.root={tmp_path}/job", "data.train=train.jsonl", "data.sequence_length=12"]
    words += [f"data.tokenizer={corpus}/tokenizer", "teacher.init.pretrained=null"]
    words += ["epochs=1", "batch={size: 16, micro_batch: 16}", "log.wandb=disabled"]
    words += [f"output_dir={tmp_path}/runs", "teacher.model={hidden_size: 32, layers: 1, heads: 2}"]
    words += ["teacher.model.ffn_size=64", "teacher.model.vocab_size=600"]
    ended = in_a_fork("train", "multi_label", *words)
    assert ended.returncode == 0, ended.stderr
    assert "micro_f1" in next(tmp_path.glob("runs/*/evaluation.json")).read_text()


@pytest.mark.parametrize(
    ("settings", "several", "message"),
    [
        ("{}", True, "train.jsonl:1: label: is a list"),
        (ALL, False, "train.jsonl:1: label: 'the' is no list"),
        ("{class_weights: {and: 0, of: 0, the: 0}}", False, "must not be 0 for all labels"),
        ("{class_weights: {a: 2}}", False, "class_weights: a is none of the labels: and, of, the"),
    ],
)
def test_what_is_no_list_or_no_label_is_refused(
    corpus, tmp_path, settings: str, several: bool, message: str
) -> None:
    path = job_in(tmp_path / "job", corpus, settings, several)
    with pytest.raises(DataError) as refused:
        with_examples(configs.load(str(path), JobConfig, "job"))
    assert message in str(refused.value)
