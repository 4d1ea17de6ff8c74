"""`tandem predict`, against `transformers` on the same exported model, one example at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

import tandem
from data_pipeline.tokenization.tokenizer import load
from data_pipeline.tokenization.training import train
from model import (
    CHOICE,
    CLASSIFICATION,
    MULTI_LABEL,
    OTHER,
    REGRESSION,
    SPAN,
    TAGGING,
    VECTOR,
    TaskHeadConfig,
    build,
    save_pretrained,
    with_task_head,
)
from model.task_head_config import KINDS
from tests.trainer import tiny
from trainer.prediction import fine_tuned, rankings
from trainer.prediction.predicting import PREDICTORS
from trainer.task_facts import TaskFacts, write_facts
from trainer.tasks.bi_encoder import POOLINGS

TEXTS = [
    "The system runs a small command.",
    "no",
    "A file is read, and then it is written again to another place on the disk.",
    "Who has seen it?",
]
TAGS = ["O", "B-PER", "I-PER"]


@pytest.fixture(scope="module")
def tokenizer(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train([str(text)], "wordpiece", 300, str(folder))
    return folder


@pytest.fixture(scope="module")
def exported(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(head: TaskHeadConfig, facts: TaskFacts, lacks: int = 0) -> Path:
        """A model whose vocabulary `lacks` that many of the tokenizer's tokens."""
        folder = tmp_path_factory.mktemp(head.kind)
        size = load(tokenizer)[1].vocab_size - lacks
        config = tiny.encoder(
            vocab_size=size, max_positions=64, mlm_head=False, initializer_range=0.3
        )
        model = build(with_task_head(config, "task", head), seed=4)
        save_pretrained(model, folder, tokenizer=tokenizer)
        write_facts(folder, {"task": facts})
        return folder

    return make


def predicted(*words: object, given: str | None = None) -> list[dict[str, Any]]:
    """The output of `tandem predict`, without the numbers of rows."""
    ended = CliRunner().invoke(tandem.main, ["predict", *map(str, words)], input=given)
    assert ended.exit_code == 0, ended.output
    return unnumbered(ended.stdout)


def unnumbered(output: str) -> list[dict[str, Any]]:
    """The answers in JSON lines, which have the numbers of their rows, without these."""
    answers = [json.loads(line) for line in output.splitlines()]
    assert [answer.pop("row") for answer in answers] == [*range(1, len(answers) + 1)]
    return answers


def refused(*words: object) -> str:
    ended = CliRunner().invoke(tandem.main, ["predict", *map(str, words)])
    assert ended.exit_code == (2 if ended.stderr.startswith("tandem: --") else 1)
    assert ended.stderr.count("\n") == 1
    return ended.stderr


@pytest.fixture(scope="module")
def classifier(exported) -> Path:
    head = TaskHeadConfig(CLASSIFICATION, ["bad", "good", "so so"])
    return exported(head, TaskFacts(columns={"text": "review"}, sequence_length=64))


@torch.no_grad()
def class_chances(folder: Path, *texts: str) -> np.ndarray:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    read = AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt")
    return model(**read).logits[0].softmax(dim=-1).numpy()


def test_labels_that_are_right_or_not_each_by_itself(exported, tmp_path) -> None:
    folder = exported(TaskHeadConfig(MULTI_LABEL, ["cheap", "good", "long"]), TaskFacts())
    (tmp_path / "a.txt").write_text("\n".join(TEXTS) + "\n")
    found = predicted(folder, tmp_path / "a.txt")
    theirs = pipeline("text-classification", str(folder), top_k=None)  # it applies a sigmoid
    for one, scores in zip(found, theirs(TEXTS), strict=True):
        assert one["probabilities"] == {
            score["label"]: pytest.approx(score["score"], abs=1e-4) for score in scores
        }
        assert one["labels"] == [
            name for name, chance in one["probabilities"].items() if chance > 0.5
        ]
    assert {len(one["labels"]) for one in found} - {1}


def test_each_kind_of_head_has_a_predictor_or_is_refused() -> None:
    assert set(KINDS) - PREDICTORS.keys() == {OTHER, VECTOR, "detection"}  # vectors go by task


def test_an_output_that_only_its_task_can_read_is_refused(exported, tmp_path) -> None:
    folder = exported(TaskHeadConfig(OTHER, ["mean", "variance"]), TaskFacts())
    assert "its head task is of kind other, whose output only its task" in refused(folder, "a.txt")


@pytest.mark.parametrize("tokens", [1 << 13, 20])
def test_labels_in_the_order_of_the_input(classifier, tmp_path, monkeypatch, tokens) -> None:
    monkeypatch.setattr(fine_tuned, "tokens_per_pass", lambda device: tokens)
    path = tmp_path / "reviews.tsv"
    path.write_text("id\treview\n" + "".join(f"7\t{text}\n" for text in TEXTS))
    found = predicted(classifier, path)
    assert len(found) == len(TEXTS)
    for text, one in zip(TEXTS, found, strict=True):
        chances = class_chances(classifier, text)
        np.testing.assert_allclose(list(one["probabilities"].values()), chances, atol=1e-5)
        assert one["label"] == ["bad", "good", "so so"][int(chances.argmax())]
    assert len({one["probabilities"]["good"] for one in found}) > 1


def test_a_number_that_is_not_finite_is_printed_as_null(exported) -> None:
    folder = exported(TaskHeadConfig(REGRESSION), TaskFacts(sequence_length=64))
    weights = load_file(folder / "model.safetensors")
    weights["classifier.weight"].fill_(3e38)  # finite, but no sum of it
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    ended = CliRunner().invoke(tandem.main, ["predict", str(folder), "-"], input="good\n")
    assert ended.exit_code == 0, ended.output
    (line,) = ended.stdout.splitlines()
    assert None in json.loads(line, parse_constant=pytest.fail).values()


def test_a_pipe_is_refused(classifier, tmp_path) -> None:
    os.mkfifo(pipe := tmp_path / "rows.txt")
    assert f"{pipe}: is a pipe; write its content to a file" in refused(classifier, pipe)


def test_ways_in_and_out_for_texts(classifier, tmp_path) -> None:
    plain = "\n".join(TEXTS) + "\n"
    expected = predicted(classifier, "-", given=plain)
    (tmp_path / "a.csv").write_text("t\n" + "".join(f'"{text}"\n' for text in TEXTS))
    assert predicted(classifier, tmp_path / "a.csv", "--column", "text=t") == expected
    (tmp_path / "a.txt").write_text(plain)
    assert predicted(classifier, tmp_path / "a.txt") == expected
    out = tmp_path / "answers.jsonl"
    assert predicted(classifier, tmp_path / "a.csv", "--column", "text=1", "--out", out) == []
    answers = unnumbered(out.read_text())
    assert answers[1:] == expected  # the header is a text too
    assert not list(tmp_path.glob("*.part"))
    os.mkfifo(pipe := tmp_path / "pipe")
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        predicted(classifier, tmp_path / "a.csv", "--column", "text=1", "--out", pipe)
        assert reader.communicate(timeout=60)[0] == out.read_text()
    assert pipe.is_fifo(), "no file takes its place"


def test_no_line_of_a_plain_file_is_lost(classifier, exported, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("good\tcheap\n")
    assert "a.txt:1: a line must be one text" in refused(classifier, tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("")
    assert "a.txt: holds no lines" in refused(classifier, tmp_path / "a.txt")
    facts = TaskFacts(("text_a", "text_b"), sequence_length=64)
    pairs = exported(TaskHeadConfig(REGRESSION), facts)
    (tmp_path / "a.txt").write_text("good\n")
    asked = "a.txt:1: a line must be text_a TAB text_b"
    assert asked in refused(pairs, tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("good\tcheap\t1\n")
    assert "give the columns: --column text_a=NUMBER" in refused(pairs, tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("a.tsv", "review\tx\ngood\ta\n\n \t \n\tx\nbad\tb\n\n"),
        ("a.csv", 'review\ngood\n\n  \n""\nbad\n\n'),
        ("a.jsonl", '{"review": "good"}\n\n \n{"review": " "}\n{"review": "bad"}\n\n'),
        ("a.txt", "good\n\n \n  \nbad\n\n"),
    ],
)
def test_row_n_has_answer_n(classifier, tmp_path, name: str, rows: str, caplog) -> None:
    """Blank rows of tables vanished, so that answers stood beside other rows."""
    (tmp_path / name).write_text(rows)
    good, *nothing, bad, last = predicted(classifier, tmp_path / name)
    (tmp_path / "b.txt").write_text("good\nbad\n")
    assert predicted(classifier, tmp_path / "b.txt") == [good, bad]
    assert [*nothing, last] == [{"label": None, "probabilities": None}] * 4
    assert f"{name}: rows without a text, whose answers are null: 4" in caplog.text


def test_a_txt_file_with_the_columns_of_training_is_a_table(classifier, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("id\treview\n1\tgood\n2\tbad\n")
    (tmp_path / "b.txt").write_text("good\nbad\n")
    assert predicted(classifier, tmp_path / "a.txt") == predicted(classifier, tmp_path / "b.txt")


def test_a_txt_file_has_the_numbered_columns_of_training(exported, tmp_path) -> None:
    facts = TaskFacts(("text",), {"text": "3", "label": "1"})
    folder = exported(TaskHeadConfig(CLASSIFICATION, ["no", "yes"]), facts)
    (tmp_path / "a.txt").write_text("yes\t1\tgood\tx\nno\t2\tbad\tx\n")
    (tmp_path / "b.txt").write_text("good\nbad\n")
    assert predicted(folder, tmp_path / "a.txt") == predicted(folder, tmp_path / "b.txt")
    (tmp_path / "b.txt").write_text("good\tbad\n")
    assert "b.txt:1: a line must be one text" in refused(folder, tmp_path / "b.txt")


def test_a_file_in_another_encoding_than_in_training(classifier, tmp_path) -> None:
    rows = "review\nnaïve\nsmall\n"
    (tmp_path / "a.csv").write_text(rows, encoding="utf-8")
    (tmp_path / "b.csv").write_text(rows, encoding="cp1252")
    read = predicted(classifier, tmp_path / "b.csv", "--encoding", "cp1252")
    assert read == predicted(classifier, tmp_path / "a.csv")
    assert "b.csv" in refused(classifier, tmp_path / "b.csv")
    ended = CliRunner().invoke(tandem.main, ["predict", "m", "a.csv", "--encoding", "none"])
    assert ended.exit_code == 2


def test_numbers_of_pairs(exported, tmp_path) -> None:
    facts = TaskFacts(("text_a", "text_b"), sequence_length=64)
    folder = exported(TaskHeadConfig(REGRESSION), facts)
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"text_a": one, "text_b": TEXTS[0]}) + "\n" for one in TEXTS)
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    read = AutoTokenizer.from_pretrained(folder)
    for text, one in zip(TEXTS, predicted(folder, tmp_path / "pairs.jsonl"), strict=True):
        with torch.no_grad():
            logit = model(**read(text, TEXTS[0], return_tensors="pt")).logits.item()
        assert one == {"number": pytest.approx(logit, abs=1e-4)}


def test_another_programs_model_of_pairs(exported, tmp_path) -> None:
    named = exported(TaskHeadConfig(REGRESSION), TaskFacts(fields=("text_a", "text_b")))
    pairs = [*zip(TEXTS, reversed(TEXTS), strict=True)]
    rows = "".join(f"{a}\t{b}\n" for a, b in pairs)
    (table := tmp_path / "a.tsv").write_text(f"text_a\ttext_b\n{rows}")
    (other := tmp_path / "b.tsv").write_text(f"q\tp\n{rows}")
    (plain := tmp_path / "c.txt").write_text(rows)
    expected = predicted(named, table)
    (named / "task.json").unlink()
    columns = "--column", "text_a=q", "--column", "text_b=p"
    numbers = "--column", "text_a=1", "--column", "text_b=2"
    assert predicted(named, table) == expected
    assert predicted(named, other, *columns) == expected
    assert predicted(named, plain, *numbers) == expected
    assert predicted(named, "-", *numbers, given=rows) == expected
    assert len(predicted(named, table, "--column", "text=text_a")) == len(TEXTS)


def test_a_pair_without_one_of_its_texts_has_null(exported, tmp_path) -> None:
    facts = TaskFacts(("text_a", "text_b"), sequence_length=64)
    folder = exported(TaskHeadConfig(CLASSIFICATION, ["no", "yes"]), facts)
    first, second = {"text_a": TEXTS[0], "text_b": "no"}, {"text_a": TEXTS[0], "text_b": None}
    (lines := tmp_path / "a.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([first, second]), packed := tmp_path / "a.parquet"
    )
    (cells := tmp_path / "a.csv").write_text(f"text_a,text_b\n{TEXTS[0]},no\n{TEXTS[0]},\n")
    answers = predicted(folder, cells)
    assert answers[1] == {"label": None, "probabilities": None}
    assert predicted(folder, lines) == predicted(folder, packed) == answers


def test_tags_of_words(exported, tmp_path) -> None:
    folder = exported(TaskHeadConfig(TAGGING, TAGS), TaskFacts(sequence_length=64))
    words = [text.split() for text in TEXTS]
    path = tmp_path / "sentences.conll"
    path.write_text("\n".join("".join(f"{word} X O\n" for word in one) for one in words))
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    read = AutoTokenizer.from_pretrained(folder)
    for own, one in zip(words, predicted(folder, path), strict=True):
        batch = read(own, is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            best = model(**batch).logits[0].argmax(dim=-1)
        firsts = [batch.word_ids().index(number) for number in range(len(own))]
        assert one == {"words": own, "tags": [TAGS[best[place]] for place in firsts]}


def test_raw_sentences_are_split_and_tagged(exported, tmp_path) -> None:
    """Each line's first word was taken for all of it."""
    folder = exported(TaskHeadConfig(TAGGING, TAGS), TaskFacts(sequence_length=64))

    def words(text: str) -> list[list[str]]:
        (tmp_path / "a.txt").write_text(text)
        given = predicted(folder, "-", given=text)
        assert given == predicted(folder, tmp_path / "a.txt")
        assert all(one["tags"] is None for one in given if not one["words"])
        assert all(len(one["words"]) == len(one["tags"]) for one in given if one["words"])
        return [one["words"] for one in given]

    assert words("It's Ann.\n\nShe came to Porto.\n") == [
        ["It's", "Ann", "."],
        [],
        ["She", "came", "to", "Porto", "."],
    ]
    assert words("Ann came home\n") == [["Ann", "came", "home"]]
    assert words("\u0939\u093f\u0928\u094d \u0939\u093f.\n") == [
        ["\u0939\u093f\u0928\u094d", "\u0939\u093f", "."]
    ], "Hindi"
    assert words("Ann\ncame\n\nhome\n") == [["Ann", "came"], ["home"]], "a word a line"
    assert words(f"Ann {TAGS[0]}\ncame {TAGS[1]}\n") == [["Ann", "came"]], "columns"
    equal = ["Ann came home today", "Bob saw the house", "She works at NASA", "They left at 10"]
    assert words("".join(f"{line}\n" for line in equal)) == [line.split() for line in equal]
    assert words("\n\n".join(equal[:3])) == [
        equal[0].split(),
        [],
        equal[1].split(),
        [],
        equal[2].split(),
    ]
    assert words("We met NASA\nYou met ESA\nI met JAXA\nHe met UN\n")[0] == ["We", "met", "NASA"]
    tagged = "Ann NNP\ncame VBD\n. .\n\nBob NNP\nleft VBD\n"
    assert words(tagged) == [["Ann", "came", "."], ["Bob", "left"]], "parts of speech"
    (tmp_path / "a.txt").write_text("Ann\tO\ncame\tX\tO\n")
    assert "a.txt:2: has 3 columns, where its sentence begins with 2" in refused(
        folder, tmp_path / "a.txt"
    )
    lines = [{"tokens": ["Ann", "came"], "ner_tags": ["O", "O"]}, {"tokens": []}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n\n" for line in lines))
    found = [one["words"] for one in predicted(folder, tmp_path / "a.jsonl")]
    assert found == [["Ann", "came"], [], [], []], "a blank line is answered too"


def test_a_user_says_and_is_told_how_lines_are_read(exported, tmp_path, caplog) -> None:
    folder = exported(TaskHeadConfig(TAGGING, TAGS), TaskFacts((), sequence_length=64))
    (path := tmp_path / "a.txt").write_text("x ann noun\nx came verb\n")
    assert [one["words"] for one in predicted(folder, path)] == [
        ["x", "ann", "noun"],
        ["x", "came", "verb"],
    ]
    assert f"{path}: read as raw text, a sentence a line; if it has columns, say" in caplog.text
    caplog.clear()
    (answer,) = predicted(folder, path, "--column", "word=2")
    assert answer["words"] == ["ann", "came"]
    assert "read as" not in caplog.text, "it was said"
    for wrong in ("0", "form"):
        assert f"--column word={wrong}: must be the number" in refused(
            folder, path, "--column", f"word={wrong}"
        )
    path.write_text("Ann O\ncame O\n")
    predicted(folder, path)
    assert f"{path}: read as columns, a word a line" in caplog.text


@pytest.mark.parametrize("kind", [CLASSIFICATION, pytest.param(TAGGING, marks=pytest.mark.slow)])
def test_a_pipe_is_answered_while_it_is_written(exported, kind: str) -> None:
    labels = TAGS if kind == TAGGING else ["bad", "good"]
    fields = () if kind == TAGGING else ("text",)
    folder = exported(TaskHeadConfig(kind, labels), TaskFacts(fields, sequence_length=64))
    command = [sys.executable, "-m", "tandem", "predict", str(folder), "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        for row, text in enumerate(TEXTS[::2], start=1):
            process.stdin.write(f"{text}\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["row"] == row
        rest, _ = process.communicate("".join(f"{text}\n\n" for text in TEXTS), timeout=60)
        rows = [json.loads(line)["row"] for line in rest.splitlines()]
        assert rows == [*range(3, 3 + 2 * len(TEXTS))]
        assert process.returncode == 0


def test_a_word_without_a_token_is_unknown(exported, tmp_path) -> None:
    folder = exported(TaskHeadConfig(TAGGING, TAGS), TaskFacts(sequence_length=64))
    for name, word in (("a", "\ufe0f"), ("b", "\N{SNOWMAN}")):
        (tmp_path / f"{name}.conll").write_text(f"the O\n{word} O\nfile O\n")
    (variation,), (snowman,) = (predicted(folder, tmp_path / f"{one}.conll") for one in "ab")
    assert variation["words"] == ["the", "\ufe0f", "file"]
    assert variation["tags"] == snowman["tags"], "which is [UNK] to this vocabulary"


@pytest.mark.parametrize("crf", [False, True])
def test_every_word_of_a_long_sentence_has_a_tag(exported, tmp_path, crf: bool) -> None:
    """That of the window with the most context, as `transformers` finds it in each window alone."""
    folder = exported(TaskHeadConfig(TAGGING, TAGS, crf=crf), TaskFacts(sequence_length=12))
    words = " ".join(TEXTS).split()
    (tmp_path / "a.conll").write_text("".join(f"{word}\n" for word in words))
    (found,) = predicted(folder, tmp_path / "a.conll")
    assert found["words"] == words
    assert set(found["tags"]) <= set(TAGS)
    if crf:
        return
    read = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    whole = read(words, is_split_into_words=True, add_special_tokens=False)
    ids, firsts = whole["input_ids"], [whole.word_ids().index(n) for n in range(len(words))]
    best: dict[int, tuple[float, str]] = {}
    for start in range(0, len(ids), 5):
        window = ids[start : start + 10]
        own = [read.cls_token_id, *window, read.sep_token_id]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([own])).logits[0]
        for at in range(len(window)):
            context = min(at, len(window) - 1 - at) + 0.01 * len(window)
            if context > best.get(start + at, (-1.0, ""))[0]:
                best[start + at] = context, TAGS[int(logits[at + 1].argmax())]
        if start + 10 >= len(ids):
            break
    assert found["tags"] == [best[first][1] for first in firsts]


def test_texts_that_are_cut_are_counted_once(exported, tmp_path, caplog) -> None:
    long = " ".join(TEXTS)
    (tmp_path / "a.txt").write_text(f"{long}\nno\n{long}\n")
    told = "texts too long for 12 tokens, whose ends are not read: "
    predicted(
        exported(TaskHeadConfig(REGRESSION), TaskFacts(sequence_length=12)), tmp_path / "a.txt"
    )
    assert f"a.txt: {told}2" in caplog.text
    choices = exported(TaskHeadConfig(CHOICE), TaskFacts((), sequence_length=12))
    record = {"article": long, "questions": ["Who?"], "options": [TEXTS[:3]]}
    predicted(choices, "-", given=json.dumps(record))
    assert f"standard input: {told}1" in caplog.text, "not each of its choices"


@pytest.mark.parametrize("nothing", [" ", "\u200b"])
def test_blank_queries_have_answers_too(exported, tmp_path, caplog, nothing: str) -> None:
    head = TaskHeadConfig(VECTOR, pooling=POOLINGS["mean"], transform="none", normalise=True)
    folder = exported(head, TaskFacts((), sequence_length=64, settings={"task": "retrieval"}))
    queries = f"{TEXTS[0]}\n{nothing}\n{TEXTS[2]}\n"
    first, blank, third = predicted(folder, "-", given=queries)
    (plain := tmp_path / "queries.txt").write_text(queries)
    assert predicted(folder, plain) == [first, blank, third]
    assert blank == {"query": "2", "vector": None}
    assert len(first["vector"]) == len(third["vector"]) > 1
    rows = [json.dumps({"_id": str(n), "text": text}) for n, text in enumerate([*TEXTS, nothing])]
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    ranked = predicted(folder, "-", "--documents", tmp_path / "d.jsonl", given=queries)
    assert [len(one["documents"]) for one in ranked] == [4, 0, 4]
    assert [one["documents"][0]["id"] for one in (ranked[0], ranked[2])] == ["0", "2"]
    assert caplog.text.count("rows without a text, whose answers are null: 1") == 3
    facts = TaskFacts(("text_a", "text_b"), sequence_length=64, settings={"task": "reranking"})
    crossed = exported(TaskHeadConfig(REGRESSION), facts)
    run = tmp_path / "run.txt"
    run.write_text("1 Q0 3 1 1 x\n2 Q0 1 1 1 x\n2 Q0 0 2 3 x\n")
    files = ("--documents", tmp_path / "d.jsonl", "--candidates", run)
    _, blank, _ = predicted(crossed, "-", *files, given=queries)
    assert [one["id"] for one in blank["documents"]] == ["0", "1"], "as they were ranked"
    assert predicted(crossed, plain, *files)[1] == blank


def test_documents_and_queries_that_are_cut_are_counted_apart(exported, tmp_path, caplog) -> None:
    head = TaskHeadConfig(VECTOR, pooling=POOLINGS["mean"], transform="none", normalise=True)
    folder = exported(head, TaskFacts((), sequence_length=12, settings={"task": "retrieval"}))
    long = " ".join(TEXTS)
    rows = [json.dumps({"_id": str(n), "text": text}) for n, text in enumerate([long, long, "no"])]
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    (tmp_path / "queries.txt").write_text(f"no\n{long}\n")
    predicted(folder, tmp_path / "queries.txt", "--documents", tmp_path / "d.jsonl")
    told = "texts too long for 12 tokens, whose ends are not read: "
    assert f"d.jsonl: {told}2" in caplog.text
    assert f"queries.txt: {told}1" in caplog.text


def test_blank_records_have_answers_too(exported, tmp_path, caplog) -> None:
    """Line N of JSON lines, and row N of Parquet, has answer N, whatever the task."""

    def answers(folder: Path, *records: dict[str, Any]) -> list[dict[str, Any]]:
        first, last = map(json.dumps, records)
        (path := tmp_path / "a.jsonl").write_text(f"{first}\n\n{{}}\n{last}\n")
        (parquet := tmp_path / "a.parquet").unlink(missing_ok=True)
        nothing = dict.fromkeys(records[0])
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([records[0], nothing, nothing, records[1]]), parquet
        )
        found = predicted(folder, path)
        assert predicted(folder, parquet) == found
        assert caplog.text.count("rows without a text, whose answers are null: 2") == 2
        caplog.clear()
        return found

    tagger = exported(TaskHeadConfig(TAGGING, TAGS), TaskFacts((), sequence_length=64))
    tagged = answers(tagger, {"tokens": ["no"]}, {"tokens": ["Who", "?"]})
    assert [one["words"] for one in tagged] == [["no"], [], [], ["Who", "?"]]
    asked = {"question": "Who?", "context": TEXTS[0]}
    reader = exported(TaskHeadConfig(SPAN), TaskFacts((), sequence_length=64))
    spans = answers(reader, {"id": "a", **asked}, {"id": "b", **asked})
    assert [one["id"] for one in spans] == ["a", None, None, "b"]
    assert spans[1] == dict.fromkeys(("id", "answer", "start", "score"))
    head = TaskHeadConfig(VECTOR, pooling=POOLINGS["mean"], transform="none", normalise=True)
    facts = TaskFacts((), sequence_length=64, settings={"task": "retrieval"})
    encoder = exported(head, facts)
    vectors = answers(encoder, {"_id": "a", "text": "no"}, {"_id": "b", "text": "Who?"})
    assert [one["query"] for one in vectors] == ["a", None, None, "b"]
    assert vectors[1] == {"query": None, "vector": None}


def test_choices_without_a_text(exported, tmp_path, caplog) -> None:
    folder = exported(TaskHeadConfig(CHOICE), TaskFacts((), sequence_length=64))
    record = {"questions": ["Who?"], "options": [TEXTS[:2]]}
    articles = {"a": " ", "b": "Ann."}
    given = "\n".join(
        json.dumps({**record, "id": name, "article": text}) for name, text in articles.items()
    )
    blank, read = predicted(folder, "-", given=given)
    assert blank == {"id": "a-0", "choice": None, "answer": None, "probabilities": None}
    assert read["choice"] in (0, 1)
    assert "rows without a text, whose answers are null: 1" in caplog.text


def test_choices(exported, tmp_path) -> None:
    folder = exported(TaskHeadConfig(CHOICE), TaskFacts((), sequence_length=64))
    asked = {"question": "Who?", "choice": TEXTS[:3], "answer": TEXTS[0]}
    path = tmp_path / "dev.json"
    path.write_text(json.dumps([[[TEXTS[3], "W: No."], [asked], "14-3"]]))
    (one,) = predicted(folder, path)
    assert predicted(folder, "-", given=json.dumps(json.loads(path.read_text()), indent=1)) == [one]
    model = AutoModelForMultipleChoice.from_pretrained(folder).eval()
    passage = f"{TEXTS[3]}\nW: No."
    read = AutoTokenizer.from_pretrained(folder)
    pairs = read(
        [passage] * 3,
        [f"Who?{read.sep_token}{c}" for c in TEXTS[:3]],
        return_tensors="pt",
        padding=True,
    )
    with torch.no_grad():
        logits = model(**{name: value[None] for name, value in pairs.items()}).logits[0]
    assert one["id"] == "14-3-0"
    assert one["choice"] == int(logits.argmax())
    assert one["answer"] == TEXTS[one["choice"]]
    np.testing.assert_allclose(one["probabilities"], logits.softmax(dim=0).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--candidates", "first.jsonl"], "--candidates: needs --documents"),
        (["--top", "3"], "--top: needs --documents"),
        (["--documents", "d.jsonl", "--column", "text=1"], "--column: is for tables of texts"),
        (["--column", "text"], "--column text: must be FIELD=COLUMN"),
        (["--documents", "-"], "--documents: must be a file"),
        (["--documents", "d.jsonl", "--candidates", "-"], "--candidates: standard input is INPUT"),
    ],
)
def test_options_that_would_have_no_effect(options, message) -> None:
    ended = CliRunner().invoke(tandem.main, ["predict", "exports/teacher", "-", *options])
    assert ended.exit_code == 2
    assert message in ended.stderr


def test_candidates_of_queries_that_standard_input_lacks(monkeypatch, tmp_path) -> None:
    """Its queries have numbers whatever the model was trained on."""
    task = SimpleNamespace(numbered_by_order=False)
    facts = SimpleNamespace(section=lambda _: task, encoding="utf-8")
    reranker = SimpleNamespace(head=SimpleNamespace(kind=REGRESSION), facts=facts)
    monkeypatch.setattr(rankings.FineTuned, "open", lambda *_: reranker)
    (documents := tmp_path / "d.jsonl").write_text('{"_id": "d0", "text": "no"}\n')
    (first := tmp_path / "first").write_text("q0 Q0 d0 1 0.5 x\n")
    words = ["predict", "m", "-", "--documents", str(documents), "--candidates", str(first)]
    ended = CliRunner().invoke(tandem.main, words, input="Who?\n")
    why = "standard input has no query 'q0'; its queries are counted 1, 2, 3, ..."
    assert (ended.exit_code, ended.stderr) == (1, f"tandem: {first}:1: {why}\n")


def test_input_that_cannot_be_read(classifier, exported, tokenizer, tmp_path) -> None:
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    assert "no column 'review'" in refused(classifier, write("a.tsv", "text\nx\n"))
    assert "a.tsv: holds no rows" in refused(classifier, write("a.tsv", ""))
    assert "nothing.tsv: cannot be read" in refused(classifier, tmp_path / "nothing.tsv")
    out = tmp_path / "out.jsonl"
    refused(classifier, write("a.tsv", "review\tx\na\tb\nb\n"), "--out", out)
    assert not out.exists()
    column = refused(classifier, write("a.tsv", "t\nx\n"), "--column", "txt=t")
    assert "--column txt: no such field; did you mean text? There are: text" in column
    documents = tmp_path / "a.tsv", "--documents", tmp_path / "a.tsv"
    head = refused(classifier, *documents, "--head", "other")
    assert head.startswith(f"tandem: --head: {classifier} has no head other; there are: ")
    few = exported(TaskHeadConfig(CLASSIFICATION, ["a", "b"]), TaskFacts(), lacks=1)
    assert "its tokenizer has more tokens than its model" in refused(few, tmp_path / "a.tsv")
    bare = tmp_path / "bare"
    save_pretrained(build(tiny.encoder(vocab_size=300), seed=1), bare, tokenizer=tokenizer)
    assert "bare: has no head of a task" in refused(bare, tmp_path / "a.tsv")
    assert "nowhere: no such folder" in refused(tmp_path / "nowhere", tmp_path / "a.tsv")
    (classifier / "task.json").rename(tmp_path / "kept.json")
    (classifier / "task.json").write_text("{}")
    assert "task.json: fields: must be set" in refused(classifier, tmp_path / "a.tsv")
    (tmp_path / "kept.json").rename(classifier / "task.json")
