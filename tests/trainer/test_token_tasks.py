"""Tagging, spans and multiple choice: from files to scores that other packages compute too."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

import configs
import tandem
from data_pipeline import Corpus, DataError, ExampleSplit
from data_pipeline.task_files.contents import Dropped
from model import Capture
from tests.distributed import run_distributed
from tests.trainer import jobs
from tests.trainer.tiny import encoder
from trainer.config import JobConfig
from trainer.evaluation import final_scores
from trainer.evaluation.final_scores import evaluate_run
from trainer.evaluation.finished import SavedLearners
from trainer.job_data.examples import with_examples
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER
from trainer.learners.module import build_module
from trainer.objectives import ObjectiveConfig
from trainer.objectives.task import TaskFile
from trainer.prediction.predicting import predictions
from trainer.run_folder.folder import RunFolder
from trainer.scoring.span_metric import best_spans, best_threshold
from trainer.task_facts import TaskFacts
from trainer.tasks.sentences import SingleSentence

JOB = """
name: {task}
steps: {steps}
output_dir: {folder}/runs
data:
  {{root: {folder}, train: {task}_train, validation: {task}_dev, sequence_length: 48,
  tokenizer: {corpus}/tokenizer}}
batch: {{size: 8, micro_batch: 4}}
teacher:
  model: {{hidden_size: 32, layers: 2, heads: 2, ffn_size: 64, vocab_size: 600, max_positions: 48}}
  optimizer: {{learning_rate: 3.0e-3}}
  objective: {{{task}: {settings}}}
evaluation: {{every: 1000}}
checkpoint: {{every: 1000}}
log: {{every: 10, wandb: disabled}}
"""
WHOLE = "batch.micro_batch=8"  # of one rank
WORDS = ["the", "of", "and", "to", "in", "that", "is", "was", "for", "his", "with", "as"]
NAMES = ["Monday", "list", "class"]


def sentence(number: int) -> list[str]:
    return [WORDS[(number * step + step) % len(WORDS)] for step in range(1, 4 + number % 4)]


def conll(count: int, shift: int) -> str:
    """Words with tags; the words in NAMES are names."""
    rows = []
    for number in range(shift, shift + count):
        words = sentence(number)
        words.insert(number % 3, NAMES[number % 3])
        rows += [f"{word} {'B-NAME' if word in NAMES else 'O'}" for word in words] + [""]
    return "\n".join(rows)


def squad(count: int, shift: int, unanswerable: bool = False) -> str:
    """Passages that contain one of NAMES, which is the answer; some are longer than a window."""
    paragraphs = []
    for number in range(shift, shift + count):
        words = sentence(number) * (1 + 8 * (number % 7 == 0))
        place = number % len(words)
        name = NAMES[number % 3]
        none = unanswerable and number % 2 == 0
        before = " ".join(words[:place])
        start = len(before) + bool(before)
        context = " ".join([*words[:place], *([] if none else [name]), *words[place:]])
        answers = [] if none else [{"text": name, "answer_start": start}]
        asked = {"id": f"q{number}", "question": "which is it", "answers": answers}
        paragraphs.append({"context": context, "qas": [{**asked, "is_impossible": none}]})
    return json.dumps({"version": "2.0", "data": [{"title": "x", "paragraphs": paragraphs}]})


def without_answers(questions: str) -> str:
    """The same questions, none of which is to be answered."""
    tree = json.loads(questions)
    for paragraph in tree["data"][0]["paragraphs"]:
        for asked in paragraph["qas"]:
            asked |= {"answers": [], "is_impossible": True}
    return json.dumps(tree)


def dream(count: int, shift: int) -> str:
    """Dialogues; the right answer is the name that they contain."""
    records = []
    for number in range(shift, shift + count):
        name = NAMES[number % 3]
        asked = {"question": "which is it", "choice": [f"it is {n}" for n in NAMES]}
        records.append([[f"M: {' '.join(sentence(number))} {name}"],
                        [{**asked, "answer": f"it is {name}"}], f"d{number}"])  # fmt: skip
    return json.dumps(records)


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, make in {"tagging": conll, "span": squad, "multiple_choice": dream}.items():
        (folder / f"{name}_train").write_text(make(60, 0))
        (folder / f"{name}_dev").write_text(make(20, 300))
    (folder / "open_train").write_text(squad(40, 0, True))
    (folder / "open_dev").write_text(squad(12, 300, True))
    return folder


def load(folder: Path, corpus: Path, task: str, steps: int, settings: str, *more: str) -> JobConfig:
    text = JOB.format(folder=folder, corpus=corpus, task=task, steps=steps, settings=settings)
    return with_examples(configs.load_text(text, JobConfig, "job", more, "job.yaml"))


def train(*job: object) -> str:
    """Train and finish the job; returns its folder. Collective."""
    folder = jobs.run(load(*job))
    jobs.finish(folder)
    return str(folder.path)


def finished(ranks: int, *job: object) -> tuple[RunFolder, dict]:
    run = RunFolder(Path(run_distributed(train, ranks, *job)[0]))
    return run, json.loads(run.evaluation.read_text())["learners"]["teacher"]


@pytest.mark.parametrize("crf", [False, True])
def test_tags_are_learned_and_exported(folder, corpus, crf) -> None:
    name = f"name=tags-{crf}"
    run, scores = finished(2, folder, corpus, "tagging", 40, f"{{crf: {str(crf).lower()}}}", name)
    assert scores["tagging_entity_f1"] > 0.9
    if crf:
        return  # transformers has no such class
    exported = run.path / "exports" / "teacher"
    theirs = AutoModelForTokenClassification.from_pretrained(exported).eval()
    assert theirs.config.id2label == {0: "B-NAME", 1: "O"}
    read = AutoTokenizer.from_pretrained(exported)(["of the Monday"], return_tensors="pt")
    ours = SavedLearners(run).load("teacher")
    with torch.no_grad():
        got = ours(read.input_ids).heads["tagging"]
        torch.testing.assert_close(got, theirs(read.input_ids).logits)


def test_tags_are_shown_by_their_names(folder, corpus, tmp_path) -> None:
    text = JOB.format(folder=folder, corpus=corpus, task="tagging", steps=1, settings="{}")
    (path := tmp_path / "job.yaml").write_text(text)
    ended = CliRunner().invoke(tandem.main, ["data", "show", str(path)])
    assert ended.exit_code == 0, ended.output
    tags = [line for line in ended.stdout.splitlines() if line.startswith("tagging: ")]
    assert len(tags) == 4
    assert all(":B-NAME" in line and ":O" in line for line in tags)


def curve(*job: object) -> list[float]:
    """The losses of a job's steps. Collective."""
    return [value for _, name, value in jobs.curve(jobs.run(load(*job))) if "/tagging" in name]


def test_tags_have_weights(folder, corpus) -> None:
    """With no weight, a tag is not learned; the loss is divided by the sum of the weights."""
    settings = "{class_weights: {O: 0}, metrics: [accuracy]}"
    _, scores = finished(1, folder, corpus, "tagging", 20, settings, "name=tags-weighted", WHOLE)
    rows = [row.split() for row in (folder / "tagging_dev").read_text().splitlines() if row]
    names = sum(tag == "B-NAME" for _, tag in rows) / len(rows)
    assert names < 0.5
    assert scores["tagging_accuracy"] == pytest.approx(names), "every word is tagged as a name"
    job = (folder, corpus, "tagging", 6, "{class_weights: {O: 0.1}}", "log.every=1")
    two, _ = run_distributed(curve, 2, *job, "name=tags-two")
    (whole,) = run_distributed(curve, 1, *job, "name=tags-one", WHOLE)
    assert two == pytest.approx(whole, rel=1e-3)
    assert len(two) == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{class_weights: {B-PLACE: 2}}", "class_weights: B-PLACE is none of the labels: B-NAME"),
        ("{class_weights: {O: 2}, crf: true}", "class_weights: crf weighs whole sentences"),
    ],
)
def test_weights_of_no_tag_or_of_sentences_are_refused(folder, corpus, settings, message) -> None:
    with pytest.raises((DataError, configs.ConfigError)) as refused:
        load(folder, corpus, "tagging", 1, settings)
    assert message in str(refused.value)


def test_the_first_piece_of_a_word_has_its_tag(folder, corpus) -> None:
    job = load(folder, corpus, "tagging", 10, "{}")
    split = ExampleSplit(Corpus.open(job.data.path), "train")
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    batch = split.batch(np.arange(6), np.zeros(6, np.int64))
    for number in range(6):
        words = [line.split()[0] for line in conll(1, number).split("\n") if line]
        found = tokenizer(words, is_split_into_words=True)
        columns = [found.word_ids().index(word) for word in range(len(words))]
        there = batch.targets["tagging"].is_labelled[number]
        assert batch.targets["tagging"].positions[number][there].tolist() == columns
        labels = batch.targets["tagging"].labels[number][there]
        assert (labels == 0).tolist() == [word in NAMES for word in words]


def test_spans_are_learned_over_windows_and_exported(folder, corpus) -> None:
    run, scores = finished(2, folder, corpus, "span", 80, "{stride: 8, longest_answer: 5}")
    assert scores["span_exact_match"] > 0.5
    assert scores["span_answer_f1"] >= scores["span_exact_match"]
    exported = run.path / "exports" / "teacher"
    theirs = AutoModelForQuestionAnswering.from_pretrained(exported).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    read = tokenizer("which is it", "of the Monday", return_tensors="pt")
    ours = SavedLearners(run).load("teacher")
    with torch.no_grad():
        got = ours(read.input_ids, read.token_type_ids).heads["span"]
        told = theirs(**read)
    torch.testing.assert_close(got[..., 0], told.start_logits)
    torch.testing.assert_close(got[..., 1], told.end_logits)
    for name in ("README.md", "task.json"):
        assert str(folder) not in (exported / name).read_text(), "a folder of this machine"


def test_each_answer_is_in_a_window_at_its_place(folder, corpus) -> None:
    job = load(folder, corpus, "span", 10, "{stride: 8}")
    split = ExampleSplit(Corpus.open(job.data.path), "train")
    assert split.total > 60
    batch = split.batch(np.arange(split.total), np.zeros(split.total, np.int64))
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    answered = set()
    for row in range(split.total):
        first, last = (batch.targets[name].labels[row] for name in ("span", "span_last"))
        number = int(batch.targets["span_question"].labels[row])
        if first:
            text = tokenizer.decode(batch.input_ids[row, first : last + 1]).replace(" ", "")
            assert text.lower() == NAMES[number % 3].lower()
            answered.add(number)
    assert answered == set(range(60))


def test_questions_without_an_answer_get_a_threshold(folder, corpus) -> None:
    """It is found on the validation file, and kept for the test file and for predictions."""
    (folder / "none_test").write_text(without_answers(squad(12, 500)))
    task = "{unanswerable: true, metrics: [exact_match]}"
    more = ("data.train=open_train", "data.validation=open_dev", "data.test=none_test", "name=open")
    run, scores = finished(1, folder, corpus, "span", 100, task, *more, WHOLE)
    assert scores["span_exact_match"] >= 0.5
    exported = run.path / "exports" / "teacher"
    threshold = TaskFacts.read(exported, "span").scores["span_null_threshold"]
    assert threshold == scores["span_null_threshold"] == scores["test_span_null_threshold"]
    told = list(predictions(exported, str(folder / "none_test"), torch.device("cpu")))
    silent = [one["answer"] is None for one in told]
    assert scores["test_span_exact_match"] == pytest.approx(np.mean(silent))
    # The best threshold for the test file, below all margins, would have given no answer at all.
    assert not all(silent)


def test_a_split_may_be_a_folder_as_race_has_it(folder, corpus) -> None:
    asked = {"questions": ["which is it"], "options": [NAMES], "answers": ["B"]}
    for part, files in {"race_train": 3, "race_dev": 2}.items():
        for number in range(files):
            path = folder / part / ("high", "middle")[number % 2] / f"{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**asked, "article": " ".join(sentence(number))}))
    parts = ("data.train=race_train", "data.validation=race_dev")
    job = load(folder, corpus, "multiple_choice", 10, "{}", *parts)
    splits = [ExampleSplit(Corpus.open(job.data.path), split).total for split in ("train", "val")]
    assert splits == [3, 2]
    path.write_text(path.read_text().replace('"B"', '"C"'))
    again = load(folder, corpus, "multiple_choice", 10, "{}", *parts)
    assert again.data.path != job.data.path, "other files are other examples"


def test_a_best_span_ends_after_it_begins() -> None:
    def target(*labels: int) -> SimpleNamespace:
        return SimpleNamespace(labels=torch.tensor(labels), positions=torch.tensor([2, 3, 4, 0]))

    logits = torch.tensor([[[1.0, 2.0], [9, 9], [0, 5], [3, 0], [1, 1]]])
    targets = {
        "a_begins": target(10, 20, 30, -100),
        "a_ends": target(15, 25, 35, -100),
    }
    batch = SimpleNamespace(targets=targets, row_labels=lambda _: torch.tensor([7]))
    # Begin at 20 (3.0) and end at 35 (1.0): the best pair that is in order is [0] to [0], 0 + 5.
    assert best_spans(logits, batch, "a", 30).tolist() == [[7, 5, 3, 10, 15]]
    logits[0, 2, 1] = 0
    assert best_spans(logits, batch, "a", 30).tolist() == [[7, 4, 3, 20, 35]]
    assert best_spans(logits, batch, "a", 1).tolist() == [[7, 3, 3, 20, 25]]


def test_the_threshold_is_the_one_with_the_highest_score() -> None:
    texts = {"a": "red", "b": "blue", "c": "x"}
    right = {"a": ["red"], "b": [], "c": []}
    assert best_threshold(texts, {"a": -2.0, "b": 1.0, "c": 3.0}, right) == -2.0
    assert best_threshold(texts, {"a": 5.0, "b": 1.0, "c": 3.0}, right) < 1.0
    assert best_threshold(texts, {"a": 1.0, "b": 1.0, "c": 1.0}, right) < 1.0  # all or none


def test_the_right_one_of_several_answers_is_learned(folder, corpus, monkeypatch) -> None:
    run, scores = finished(2, folder, corpus, "multiple_choice", 60, "{}")
    assert scores["multiple_choice_accuracy"] >= 0.5  # chance: a third
    assert scores["sequences_per_second"] == pytest.approx(3 * scores["examples_per_second"])
    monkeypatch.setattr(final_scores, "_encoding_seconds", lambda *_: 6.0)  # of all three
    assert evaluate_run(SavedLearners(run))["learners"]["teacher"]["seconds_per_sequence"] == 2.0
    exported = run.path / "exports" / "teacher"
    theirs = AutoModelForMultipleChoice.from_pretrained(exported).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    pairs = tokenizer(
        ["of Monday"] * 3, ["is it a", "b", "of c"], return_tensors="pt", padding=True
    )
    ours = SavedLearners(run).load("teacher")
    with torch.no_grad():
        got = ours(pairs.input_ids, pairs.token_type_ids, pairs.attention_mask)
        told = theirs(**{name: one[None] for name, one in pairs.items()}).logits
    torch.testing.assert_close(got.heads["multiple_choice"].view(1, 3), told)


@pytest.mark.parametrize("task", ["tagging", "span", "multiple_choice"])
def test_only_the_first_examples_are_scored_and_trained_on(folder, corpus, task) -> None:
    whole = load(folder, corpus, task, 10, "{}")
    assert ExampleSplit(Corpus.open(whole.data.path), "train").total >= 60
    job = load(folder, corpus, task, 10, "{}", "data.max_scored=3", "data.max_trained=7")
    opened = Corpus.open(job.data.path)
    assert 7 <= ExampleSplit(opened, "train").total < (60 if task == "span" else 8)
    scored = ExampleSplit(opened, "val")
    if task != "span":
        assert scored.total == 3
        return
    assert sorted(set(scored.labels("span_question").tolist())) == [0, 1, 2]
    (metric,) = job.metrics_of(job.teacher)
    asked = [(context, answers[0]) for _, context, answers in metric.answers()]
    starts = [(context.index(answer), len(answer)) for context, answer in asked]
    rows = [[number, 1, 0, at, at + size] for number, (at, size) in enumerate(starts)]
    assert metric.finish(torch.tensor(rows))["span_exact_match"] == 1.0, "of three questions"


def test_only_the_head_of_a_frozen_encoder_learns(folder, corpus) -> None:
    more = ("teacher.encoder=frozen", WHOLE, "name=frozen")
    settings = "{layers: [1, -1]}"
    run, scores = finished(1, folder, corpus, "tagging", 20, settings, *more)
    assert scores["tagging_entity_f1"] >= 0
    found = SavedLearners(run).weights("teacher")
    other, _ = finished(1, folder, corpus, "tagging", 5, settings, *more[:2], "name=shorter")
    shorter = SavedLearners(other).weights("teacher")
    changed = {name for name, one in found.items() if not torch.equal(one, shorter[name])}
    assert changed
    assert all(name.startswith("task_heads.tagging.") for name in changed)
    assert found["task_heads.tagging.linear.weight"].shape == (2, 64)


def test_a_frozen_encoder_gives_the_features_of_evaluation() -> None:
    objective = ObjectiveConfig(single_sentence=SingleSentence(labels=["a", "b"]))
    config = LearnerConfig(encoder(), objective, encoder="frozen", dropout=0.5)
    module = build_module(TEACHER, config, config.model, 0)
    ids = torch.arange(5, 19).view(2, 7)
    capture = Capture(last_hidden_state=True, heads=("single_sentence",))
    trained, scored = (
        module.train(mode).model.features(ids, capture=capture) for mode in (True, False)
    )
    assert torch.equal(trained.last_hidden_state, scored.last_hidden_state)
    assert not torch.equal(trained.heads["single_sentence"], scored.heads["single_sentence"])
    with_gradient = {name for name, one in module.model.named_parameters() if one.requires_grad}
    assert {name.partition(".")[0] for name in with_gradient} == {"pooler", "task_heads"}


@pytest.mark.parametrize(
    ("task", "settings", "more", "message"),
    [
        ("tagging", "{labels: [O, B-X]}", (), "'B-NAME' is not one of the tags: O, B-X"),
        ("tagging", "{}", ("data.columns.tag=1",), "no tag begins with B-, I-, E-, S-"),
        ("tagging", "{}", ("data.columns.tag=tag",), "data.columns.tag: must be a column's number"),
        (
            "tagging",
            "{}",
            ("data.columns.tags=4",),
            "columns.tags: no such field; did you mean",
        ),
        ("span", "{}", ("data.columns.text=4",), "columns.text: no such field; span has none, so"),
        ("span", "{}", ("data.validation=''",), "data.validation: must be set for span"),
        ("span", "{}", ("data.train=open_train",), "has no answer; set unanswerable: true"),
    ],
)
def test_what_cannot_be_encoded_is_named(folder, corpus, task, settings, more, message) -> None:
    with pytest.raises(DataError) as refused:
        load(folder, corpus, task, 10, settings, *more)
    assert message in str(refused.value)


def write_parquet(path: Path, column: str, feature: dict, rows: list[dict]) -> Path:
    """Write a table whose `column` `datasets` describes by `feature`."""
    note = json.dumps({"info": {"features": {column: feature}}})
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata({"huggingface": note})
    pyarrow.parquet.write_table(table, path)
    return path


CLASSES = {"_type": "ClassLabel", "names": ["O", "B-Z", "B-A"]}


def test_numbers_of_tags_are_read_as_the_names_that_the_file_has(folder, corpus, tmp_path) -> None:
    """The order is that of the file, whose numbers a model with unnamed labels has learned."""
    rows = [{"tokens": ["the", "of", "and"], "ner_tags": [0, 1, 2]} for _ in range(20)]
    listed = {"_type": "List", "feature": CLASSES}
    path = write_parquet(tmp_path / "a.parquet", "ner_tags", listed, rows)
    files = f"data.train={path}", f"data.validation={path}"
    read = load(folder, corpus, "tagging", 10, "{}", *files)
    assert read.teacher.objective.tagging.labels == CLASSES["names"]
    numbers = ExampleSplit(Corpus.open(read.data.path), "train").labels("tagging")
    assert [*numbers[numbers >= 0][:3]] == [0, 1, 2]
    other = load(folder, corpus, "tagging", 10, "{labels: [B-A, O, B-Z, B-N]}", *files)
    numbers = ExampleSplit(Corpus.open(other.data.path), "train").labels("tagging")
    assert [*numbers[numbers >= 0][:3]] == [1, 2, 0]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(DataError, match="'0' is not one of the tags: O, B-X; write names for numb"):
        load(folder, corpus, "tagging", 10, "{labels: [O, B-X]}", *files)
    with pytest.raises(DataError, match=r"as those of entities; .*; write names for numbers"):
        load(folder, corpus, "tagging", 10, "{}", *files)
    pyarrow.parquet.write_table(pyarrow.table({"words": [["a", "b"]], "tags": [[0, -100]]}), path)
    with pytest.raises(DataError, match="row 1: label: is -100; give one"):
        load(folder, corpus, "tagging", 10, "{metrics: [accuracy]}", *files)


def labels_of(task: SingleSentence, path: Path) -> tuple[list[str], list[str]]:
    """The task's labels, and those of the rows of the file, which it completes the task from."""
    file = TaskFile(path, {})
    task = task.with_labels_of(file)
    rows = task.rows(file, "text", "label", dropped=Dropped())
    return task.labels, [row.values["label"] for row in rows]


def test_numbers_of_classes_are_read_as_the_names_that_the_file_has(tmp_path) -> None:
    rows = [{"text": "a", "label": number} for number in (2, 0, 1)]
    path = write_parquet(tmp_path / "a.parquet", "label", CLASSES, rows)
    names = CLASSES["names"]
    assert labels_of(SingleSentence(), path) == (names, ["B-A", "O", "B-Z"])
    assert labels_of(SingleSentence(labels=["B-A", "O", "B-Z"]), path)[1] == ["B-A", "O", "B-Z"]
    numbers = ["0", "1", "2"]  # of a model that has learned the numbers
    assert labels_of(SingleSentence(labels=numbers), path) == (numbers, ["2", "0", "1"])
    assert labels_of(SingleSentence(target="number"), path)[1] == ["2", "0", "1"]
    path = write_parquet(
        tmp_path / "b.parquet", "label", CLASSES, [*rows, {**rows[0], "label": -1}]
    )
    with pytest.raises(DataError, match=r"row 4: label: '-1' is not .* name it in ignored_labels"):
        labels_of(SingleSentence(), path)
    ignoring = SingleSentence(ignored_labels=["-1"])
    assert labels_of(ignoring, path) == (names, ["B-A", "O", "B-Z"])
    listed = {"_type": "Sequence", "feature": CLASSES}
    several = [{"text": "a", "label": [2, 0]}, {"text": "a", "label": []}]
    path = write_parquet(tmp_path / "c.parquet", "label", listed, several)
    assert labels_of(SingleSentence(target="labels"), path) == (names, ['["B-A", "O"]', "[]"])
