"""`tandem evaluate DIR data.validation=FILE`: the scores of a finished model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import tandem
from data_pipeline.tokenization.tokenizer import load
from data_pipeline.tokenization.training import train
from model import (
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    SPAN,
    TAGGING,
    VECTOR,
    TaskHeadConfig,
    build,
    save_pretrained,
    with_task_head,
)
from tests.trainer import tiny
from tests.trainer.test_token_tasks import squad
from trainer.report.table import model_table
from trainer.task_facts import TaskFacts, write_facts

TEXTS = ["The system runs a small command.", "no", "A file is read, and then it is written.",
         "Who has seen it?", "It was on the list", "small files", "to the other"]  # fmt: skip
LABELS = ["bad", "good", "so so"]
HEADER = "text\tlabel"
TAGS = ["B-PER", "I-PER", "O"]


@pytest.fixture(scope="module")
def tokenizer(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train([str(text)], "wordpiece", 300, str(folder))
    return folder


Make = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    def make(heads: dict[str, TaskHeadConfig], **facts: TaskFacts) -> Path:
        """A model with random weights, these heads, and what task.json says of some."""
        folder = tmp_path_factory.mktemp("model")
        config = tiny.encoder(
            vocab_size=load(tokenizer)[1].vocab_size,
            max_positions=64,
            mlm_head=False,
            initializer_range=0.3,
        )
        for name, head in heads.items():
            config = with_task_head(config, name, head)
        save_pretrained(build(config, seed=4), folder, tokenizer=tokenizer)
        if facts:
            write_facts(folder, facts)
        return folder

    return make


def invoke(command: str, *words: object) -> Any:
    return CliRunner().invoke(tandem.main, [command, *map(str, words)])


def evaluated(*words: object) -> dict[str, Any]:
    ended = invoke("evaluate", *words, "--json")
    assert ended.exit_code == 0, ended.output
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def predicted(*words: object) -> list[dict[str, Any]]:
    ended = invoke("predict", *words)
    assert ended.exit_code == 0, ended.output
    return [json.loads(line) for line in ended.stdout.splitlines()]


def refused(*words: object, code: int = 1) -> str:
    ended = invoke("evaluate", *words)
    assert ended.exit_code == code, ended.output
    message: str = ended.stderr
    assert code == 2 or message.count("\n") == 1
    return message


def table(path: Path, header: str, labels: Sequence[str]) -> Path:
    rows = [f"{text}\t{label}" for text, label in zip(TEXTS, labels, strict=False)]
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_classes_as_scikit_learn_counts_them(model: Make, tmp_path: Path) -> None:
    from sklearn.metrics import accuracy_score, classification_report, f1_score

    facts = TaskFacts(columns={"text": "review"}, sequence_length=64)
    folder = model({"mood": TaskHeadConfig(CLASSIFICATION, LABELS)}, mood=facts)
    told = [LABELS[number % 3] for number in range(len(TEXTS))]
    file = table(tmp_path / "a.tsv", "review\tlabel", told)
    answers = [one["label"] for one in predicted(folder, file)]
    metrics = "teacher.objective.single_sentence.metrics=[accuracy, macro_f1]"
    found = evaluated(folder, f"data.validation={file}", metrics)
    assert found["scores"] == {
        "mood_accuracy": pytest.approx(accuracy_score(told, answers)),
        "mood_macro_f1": pytest.approx(f1_score(told, answers, average="macro")),
    }
    theirs = classification_report(told, answers, output_dict=True, zero_division=0.0)
    for label, scores in found["breakdown"]["by_class"].items():
        assert scores["f1"] == pytest.approx(theirs[label]["f1-score"])
        assert scores["count"] == theirs[label]["support"]
    shown = invoke("evaluate", folder, f"data.validation={file}", metrics).stdout
    assert f"{accuracy_score(told, answers):.1%}" in shown
    assert "so so" in shown


def test_tags_as_seqeval_counts_them(model: Make, tmp_path: Path) -> None:
    from seqeval.metrics import f1_score as entity_f1

    folder = model({"tagging": TaskHeadConfig(TAGGING, TAGS)})
    words = [text.split() for text in TEXTS]
    tags = [[TAGS[(n + len(one)) % 3] for n in range(len(one))] for one in words]
    lines = ["\n".join(map(" ".join, zip(*each, strict=True))) for each in zip(words, tags,
             strict=True)]  # fmt: skip
    (file := tmp_path / "a.txt").write_text("\n\n".join(lines) + "\n")
    answers = [one["tags"] for one in predicted(folder, file)]
    found = evaluated(folder, f"data.validation={file}")
    assert found["scores"] == {"tagging_entity_f1": pytest.approx(entity_f1(tags, answers))}


def test_numbers_labels_and_pairs_by_the_kind_of_the_head(model: Make, tmp_path: Path) -> None:
    number = model({"regression": TaskHeadConfig(REGRESSION)})
    rows = [{"text_a": text, "text_b": TEXTS[0], "label": len(text)} for text in TEXTS]
    (pairs := tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = evaluated(number, f"data.validation={pairs}")
    assert [*found["scores"]] == ["regression_pearson", "regression_spearman"]
    other = evaluated(number, f"data.validation={pairs}", "data.columns.text=text_a",
                      "teacher.objective.single_sentence={}")  # fmt: skip
    assert other["scores"] != found["scores"], "the second text is not read"
    several = model({"multi_label": TaskHeadConfig(MULTI_LABEL, LABELS)})
    lists = [{"text": text, "label": LABELS[: len(text) % 3]} for text in TEXTS]
    (file := tmp_path / "b.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in lists))
    right = [
        (label in one["labels"]) == (label in row["label"])
        for one, row in zip(predicted(several, file), lists, strict=True)
        for label in LABELS
    ]
    scores = evaluated(several, f"data.validation={file}")["scores"]
    assert scores["multi_label_accuracy"] == pytest.approx(sum(right) / len(right))


def test_the_threshold_for_no_answer_is_that_of_training(model: Make, tmp_path: Path) -> None:
    settings = {"task": "span", "unanswerable": True}
    (file := tmp_path / "a.json").write_text(squad(8, 0, unanswerable=True))
    for threshold, none in ((-1e9, True), (1e9, False)):
        facts = TaskFacts((), sequence_length=64, settings=settings,
                          scores={"span_null_threshold": threshold})  # fmt: skip
        folder = model({"span": TaskHeadConfig(SPAN)}, span=facts)
        scores = evaluated(folder, f"data.validation={file}")["scores"]
        assert scores["span_null_threshold"] == threshold
        assert (scores["span_exact_match"] == 0.5) == none, "half have no answer"


def test_labels_without_names_are_those_of_the_file_in_their_order(
    model: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = [f"LABEL_{number}" for number in range(3)]
    folder = model({"classification": TaskHeadConfig(CLASSIFICATION, labels)})
    numbers = [number % 3 for number in range(len(TEXTS))]

    def key(names: Sequence[str]) -> str:
        path = tmp_path / f"{'-'.join(names)}.tsv"
        return f"data.validation={table(path, HEADER, [names[n] for n in numbers])}"

    found = evaluated(folder, key("012"))
    assert evaluated(folder, key(LABELS))["scores"] == found["scores"]
    assert "LABEL_0, LABEL_1, LABEL_2 are bad, good, so so; teacher.init.labels" in caplog.text
    turned = key(LABELS[::-1])
    assert evaluated(folder, turned)["scores"] != found["scores"], "they are sorted"
    for named in ("init.labels", "objective.single_sentence.labels"):
        again = evaluated(folder, turned, f"teacher.{named}=[so so, good, bad]")
        assert again["scores"] == found["scores"]
        assert again["breakdown"]["labels"] == LABELS[::-1]
    caplog.clear()
    evaluated(folder, key("001"))
    assert "LABEL_0, LABEL_1, LABEL_2 are 0, 1, 2" in caplog.text, "a file has not all labels"
    assert "'a' is not one of the labels: 0, 1, 2" in invoke("evaluate", folder, key("aab")).stderr


def test_a_file_may_call_the_labels_otherwise(model: Make, tmp_path: Path) -> None:
    folder = model({"mood": TaskHeadConfig(CLASSIFICATION, LABELS[::-1])})
    names = [LABELS[number % 3] for number in range(len(TEXTS))]
    key = f"data.validation={table(tmp_path / 'a.tsv', HEADER, names)}"
    found = evaluated(folder, key)["scores"]
    numbers = [str(LABELS.index(name)) for name in names]
    key = f"data.validation={table(tmp_path / 'b.tsv', HEADER, numbers)}"
    assert evaluated(folder, key, "teacher.init.labels=[2, 1, 0]")["scores"] == found
    assert "teacher.init.labels: lists 2 for the 3 labels of the head" in refused(
        folder, key, "teacher.init.labels=[2, 1]"
    )


def test_what_cannot_be_scored_is_one_line(model: Make, tmp_path: Path) -> None:
    folder = model({"mood": TaskHeadConfig(CLASSIFICATION, LABELS)})
    file = table(tmp_path / "a.tsv", "text\tlabel", ["bad", "worse"])
    key = f"data.validation={file}"
    assert "a.tsv:3: label: 'worse' is not one of the labels: bad, good" in refused(folder, key)
    assert f"data.validation: must be set: the labelled file to score {folder} on" in refused(
        folder
    )
    for unread in ("steps=3", "teacher.frozen=true", "data.train=x", "data.test=x", "name=x"):
        assert unread.partition("=")[0] in refused(folder, key, unread)
    assert "no such file" in refused(folder, "data.validation=none.tsv").lower()
    right = f"data.validation={table(tmp_path / 'b.tsv', 'text	label', ['bad', 'good'])}"
    renamed = "teacher.objective.single_sentence.labels=[good, bad, so so]"
    assert "its head predicts bad, good, so so, but the examples" in refused(folder, right, renamed)
    assert "128" in refused(folder, right, "data.sequence_length=128")
    vectors = model({"found": TaskHeadConfig(VECTOR, pooling="mean", transform="none")})
    assert "name its task, such as teacher.objective.bi_encoder={}" in refused(vectors, key)
    assert "has no head of a task" in refused(model({}), key)
    assert "has no head of a task" in refused(model({}))  # no file would help
    both = {name: TaskHeadConfig(CLASSIFICATION, LABELS) for name in ("mood", "taste")}
    several = model(both)
    assert "choose one with --head: mood, taste" in refused(several, key)
    assert evaluated(several, right, "--head", "taste")["metric"] == "taste_accuracy"
    for words in ([folder, key, "--learner", "teacher"], [folder, folder, key]):
        refused(*words, code=2)
    assert "none: not a run" in refused("none", key)


def test_a_model_that_translates_is_scored_of_its_translations() -> None:
    results = {"model": "m", "file": "a.tsv", "head": "masked", "parameters": 1, "columns": []}
    shown = model_table({**results, "scores": {}, "breakdown": None})
    assert shown.endswith("scores: of translation, on a.tsv")
