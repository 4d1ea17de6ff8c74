"""`tandem analyze` on text and on a task: numbers, table, page, pruned folder, and refusals."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import configs
import tandem
from data_pipeline.tokenization.tokenizer import load
from data_pipeline.tokenization.training import train
from model import CLASSIFICATION, TaskHeadConfig, build, save_pretrained, with_task_head
from model.kinds.bilstm import BiLSTMConfig
from tests.trainer import tiny
from trainer.analysis.examples import delimiters
from trainer.task_facts import TaskFacts, write_facts

PROSE = "The system, it seems, runs a small command. A file is read!\n\n" * 3 + "Who has seen it?\n"
MOODS = [("The system runs.", "good"), ("no", "bad"), ("A file is read.", "good"), ("It?", "bad")]
LAYERS, HEADS = 2, 4


@pytest.fixture(scope="module")
def tokenizer(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train([str(text)], "wordpiece", 300, str(folder))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "prose.txt").write_text(PROSE)
    with (folder / "moods.tsv").open("w") as file:
        csv.writer(file, delimiter="\t").writerows([("text", "label"), *MOODS * 8])
    return folder


def exported(folder: Path, tokenizer: Path, **changes: Any) -> Path:
    size = load(tokenizer)[1].vocab_size
    config = tiny.encoder(
        vocab_size=size, max_positions=64, layers=LAYERS, initializer_range=0.4, **changes
    )
    if not config.mlm_head:
        head = TaskHeadConfig(CLASSIFICATION, ["bad", "good"])
        config = with_task_head(config, "single_sentence", head)
    save_pretrained(build(config, seed=5), folder, tokenizer=tokenizer)
    return folder


@pytest.fixture(scope="module")
def masked(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("masked"), tokenizer)


@pytest.fixture(scope="module")
def classifier(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = exported(tmp_path_factory.mktemp("classifier"), tokenizer, mlm_head=False)
    write_facts(folder, {"task": TaskFacts(sequence_length=32)})
    return folder


def run(*words: object, given: str | None = None) -> str:
    ended = CliRunner().invoke(tandem.main, ["analyze", *map(str, words)], input=given)
    assert ended.exit_code == 0, (ended.output, ended.exception)
    return ended.stdout


def refused(*words: object, code: int = 1) -> str:
    ended = CliRunner().invoke(tandem.main, ["analyze", *map(str, words)])
    assert ended.exit_code == code, (ended.output, ended.exception)
    assert code == 2 or ended.stderr.count("\n") == 1
    return ended.stderr


def test_an_analysis_on_text(masked: Path, files: Path, tmp_path: Path) -> None:
    options = ["--length", 16, "--examples", 5, "--out", tmp_path / "out", "--prune", 3]
    printed = run(masked, files / "prose.txt", *options, "--json")
    found = json.loads(printed)
    assert json.loads((tmp_path / "out/analysis.json").read_text()) == found
    assert found["metric"] == "loss"
    assert found["scored"].startswith("5 sequences")
    layers = found["patterns"]["layers"]
    assert [len(one["heads"]) for one in layers] == [HEADS] * LAYERS
    for one in layers:
        assert one["shares"]["block"] == 0  # one segment
        for head in one["heads"]:
            assert sum(head["shares"].values()) == pytest.approx(1)
    heads, whole = found["disabled"]["heads"], found["scores"]["loss"]
    assert [(one["layers"], one["head"]) for one in heads[3:5]] == [([1], 4), ([2], 1)]
    for one in heads:
        assert one["change"] == pytest.approx(one["scores"]["loss"] - whole)
    best = sorted(heads, key=lambda one: one["change"])[:3]
    assert [(one["layers"], one["head"]) for one in best] == [
        (one["layers"], one["head"]) for one in found["pruned"]["heads"]
    ]
    again = run(found["pruned"]["folder"], "-", *options[:4], "--out", tmp_path / "again",
                "--json", given=PROSE)  # fmt: skip
    assert json.loads(again)["scores"] == pytest.approx(found["pruned"]["scores"])


def test_an_analysis_of_something_else_is_not_overwritten(
    masked: Path, files: Path, tmp_path: Path
) -> None:
    few = ["--length", 16, "--examples", 2, "--out", tmp_path / "out"]
    run(masked, files / "prose.txt", *few)
    run(masked, files / "prose.txt", *few)
    other = shutil.copy(files / "prose.txt", tmp_path / "prose.txt")
    there = f"analysis.json: is the analysis of {masked} on {files / 'prose.txt'}; name another"
    assert there in refused(masked, other, *few)


def test_a_name_that_is_not_utf_8(masked: Path, tmp_path: Path) -> None:
    named = tmp_path / "caf\udce9.txt"
    named.write_text(PROSE)
    printed = run(masked, named, "--length", 16, "--examples", 2, "--out", tmp_path / "out")
    assert "caf?.txt" in printed
    assert "caf?.txt" in (tmp_path / "out/analysis.html").read_text(encoding="utf-8")


def test_an_analysis_on_a_task(classifier: Path, files: Path, tmp_path: Path) -> None:
    task = ["single_sentence", f"data.train={files / 'moods.tsv'}"]
    task += [f"data.validation={files / 'moods.tsv'}", "data.sequence_length=32"]
    task += [f"output_dir={tmp_path}"]
    printed = run(classifier, *task, "--prune", 1, "--out", tmp_path / "out")
    found = json.loads((tmp_path / "out/analysis.json").read_text())
    score = found["scores"]["single_sentence_accuracy"]
    assert score == pytest.approx(by_transformers(classifier))
    assert by_transformers(tmp_path / "out/pruned") == pytest.approx(
        found["pruned"]["scores"]["single_sentence_accuracy"]
    )
    (gone,) = found["pruned"]["heads"]
    (without,) = [
        one for one in found["disabled"]["heads"]
        if (one["layers"], one["head"]) == (gone["layers"], gone["head"])
    ]  # fmt: skip
    assert without["change"] == found["pruned"]["change"] >= 0
    assert json.loads((tmp_path / "out/pruned/task.json").read_text())["sequence_length"] == 32
    assert f"accuracy {score:.1%}" in printed.splitlines()[0]
    page = (tmp_path / "out/analysis.html").read_text()
    assert page.count('class="mix"') == LAYERS * HEADS
    assert page.count('class="change"') == LAYERS * (HEADS + 1)
    assert f"Without heads {gone['layers'][0]}.{gone['head']}" in page
    assert "src=" not in page
    assert "href=" not in page


def by_transformers(folder: Path) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    read, right = AutoTokenizer.from_pretrained(folder), []
    for text, label in MOODS:
        with torch.no_grad():
            logits = model(**read(text, return_tensors="pt")).logits[0]
        right.append(model.config.id2label[int(logits.argmax())] == label)
    return sum(right) / len(right)


def test_uniform_attention_is_another_way_to_disable(
    masked: Path, files: Path, tmp_path: Path
) -> None:
    words = [masked, files / "prose.txt", "--length", 16, "--json", "--out", tmp_path]
    zero, uniform = (
        json.loads(run(*words, *way))["disabled"]["heads"] for way in ([], ["--disable", "uniform"])
    )
    changes = np.array([[one["change"] for one in found] for found in (zero, uniform)])
    assert (np.abs(changes[0] - changes[1]) > 1e-6).all()
    assert np.abs(changes).min() > 0


def test_delimiters_are_special_tokens_and_punctuation(masked: Path) -> None:
    from model import from_pretrained

    tokenizer, vocabulary = load(masked)
    found = set(np.flatnonzero(delimiters(masked, from_pretrained(masked))).tolist())
    named = {number: tokenizer.id_to_token(number) for number in range(vocabulary.vocab_size)}
    assert {named[number] for number in found} >= {"[CLS]", "[SEP]", ".", ",", "(", "_"}
    letters = {number for number, token in named.items() if any(map(str.isalnum, token))}
    assert found & letters == {vocabulary.cls, vocabulary.sep}


def test_what_cannot_be_analysed(
    masked: Path, classifier: Path, files: Path, tokenizer: Path, tmp_path: Path
) -> None:
    prose, out = files / "prose.txt", ["--out", tmp_path / "out"]
    assert "no masked-LM head; name a task instead" in refused(classifier, prose, *out)
    assert "nothing.txt" in refused(masked, tmp_path / "nothing.txt", *out)
    (tmp_path / "empty.txt").write_text("\n\n")
    assert "empty.txt: holds no text" in refused(masked, tmp_path / "empty.txt", *out)
    (tmp_path / "short.txt").write_text("no\n")
    assert "short.txt: too short to mask" in refused(masked, tmp_path / "short.txt", *out)
    (tmp_path / "bytes.txt").write_bytes(b"a\n\xff\n")
    assert "bytes.txt:2: not valid UTF-8" in refused(masked, tmp_path / "bytes.txt", *out)
    too_long = refused(masked, prose, *out, "--length", 65)
    assert "--length 65: " in too_long
    assert "reads 64 tokens at most" in too_long
    assert "has 8 heads; leave it one" in refused(masked, prose, *out, "--prune", 8)
    task = ["single_sentence", f"data.train={files / 'moods.tsv'}", f"output_dir={tmp_path}"]
    task.append("data.sequence_length=32")
    assert "has no head for single_sentence" in refused(masked, *task, *out)
    (tmp_path / "others.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    others = [*task, f"data.train={tmp_path / 'others.tsv'}"]
    others += [f"data.validation={tmp_path / 'others.tsv'}"]
    assert "its head tells bad, good, but the examples are of x, y" in refused(
        classifier, *others, *out
    )
    assert "data.train" in refused(classifier, "single_sentence", *out)
    size = load(tokenizer)[1].vocab_size
    save_pretrained(build(BiLSTMConfig(vocab_size=size), seed=1), tmp_path / "lstm", tokenizer)
    assert "bilstm has no attention" in refused(tmp_path / "lstm", prose, *out)
    for name in ("a.de", "a.en"):
        (tmp_path / name).write_text("a file is read\n" * 4)
    task = ["c_mlm", f"data.train={tmp_path / 'a.de'}", f"data.validation={tmp_path / 'a.de'}"]
    languages = ("source_language=de", "target_language=en")
    task += [f"teacher.objective.translation.{one}" for one in languages]
    task += ["data.sequence_length=32", f"output_dir={tmp_path}"]
    assert "translation: has no head of its own" in refused(masked, *task, *out)
    (tmp_path / "out/pruned").mkdir(parents=True)
    (tmp_path / "out/pruned/config.json").write_text("mine")
    assert "config.json: exists" in refused(masked, prose, *out, "--prune", 1)


def test_wrong_usage(masked: Path, files: Path) -> None:
    prose = files / "prose.txt"
    assert "job keys are for a TASK" in refused(masked, prose, "data.root=x", code=2)
    assert "data.sequence_length" in refused(masked, "mrpc", "--length", 16, code=2)
    job = str(configs.SHIPPED / "job" / "demo.yaml")
    assert "names no examples of one task" in refused(masked, job, code=2)
    uniform = ["--disable", "uniform", "--prune", 1]
    assert "goes with --disable zero" in refused(masked, prose, *uniform, code=2)
