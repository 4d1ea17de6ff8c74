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
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

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


@pytest.mark.slow
def test_pruning_can_be_repeated_wherever_it_was_killed(
    masked: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = [masked, files / "prose.txt", "--length", 16, "--examples", 2, "--out", out]
    expected = run(*words, "--prune", 2)
    weights = (out / "pruned/model.safetensors").read_bytes()
    assert run(*words, "--prune", 2) == expected
    steps = ["trainer.analysis.analysis.save_pretrained", "trainer.analysis.analysis.write_config",
             "configs.durable.os.replace", "commands.analysis._replace_model"]  # fmt: skip
    for is_first in (False, True):
        for step in steps:
            if is_first:
                shutil.rmtree(out)
            with monkeypatch.context() as full:
                full.setattr(step, no_space)
                assert "No space left on device" in refused(*words, "--prune", 1), step
            assert not list(out.glob(".*")), step
            assert run(*words, "--prune", 2) == expected, step
            assert (out / "pruned/model.safetensors").read_bytes() == weights


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


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
    assert page.count('class="change"') == LAYERS * HEADS
    assert page.count('class="change all"') == LAYERS
    assert page.count('class="map small"') == LAYERS * HEADS
    assert page.count("worse without, by") == 1
    assert f"Without heads {gone['layers'][0]}.{gone['head']}" in page
    assert "src=" not in page
    assert "href=" not in page


def test_labels_are_in_the_order_of_the_model(tokenizer: Path, files: Path, tmp_path: Path) -> None:
    """A model whose labels were not sorted was refused."""
    head = TaskHeadConfig(CLASSIFICATION, ["good", "bad"])
    config = tiny.encoder(
        vocab_size=load(tokenizer)[1].vocab_size,
        max_positions=64,
        mlm_head=False,
        initializer_range=0.4,
    )
    model = build(with_task_head(config, "mood", head), seed=5)
    save_pretrained(model, tmp_path / "turned", tokenizer=tokenizer)
    moods = files / "moods.tsv"
    keys = [f"data.train={moods}", f"data.validation={moods}", f"output_dir={tmp_path}"]
    more = ["--out", tmp_path / "out", "--examples", 2, "--json"]
    found = json.loads(run(tmp_path / "turned", "single_sentence", *keys, *more))
    assert found["scores"]["mood_accuracy"] == by_transformers(tmp_path / "turned")


def test_a_task_is_read_at_the_length_of_the_model(
    classifier: Path, files: Path, tmp_path: Path
) -> None:
    """The task's own length of 128 was refused for a model of 64 positions."""
    moods = files / "moods.tsv"
    task = [classifier, "single_sentence", f"data.train={moods}", f"data.validation={moods}"]
    task += [f"output_dir={tmp_path}", "--out", tmp_path / "out", "--examples", 2]
    found = json.loads(run(*task, "--json"))
    score = found["scores"]["single_sentence_accuracy"]
    assert score == pytest.approx(by_transformers(classifier))
    assert "data.sequence_length: 96 is longer than the 64 tokens for which" in refused(
        *task, "data.sequence_length=96"
    )


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
        json.loads(run(*words, *way))["disabled"]["heads"] for way in (["--disable", "zero"], [])
    )
    changes = np.array([[one["change"] for one in found] for found in (zero, uniform)])
    assert (np.abs(changes[0] - changes[1]) > 1e-6).all()
    assert np.abs(changes).min() > 0


PARSED = """# text = She sees no file .
1\tShe\tshe\tPRON\t_\t_\t2\tnsubj\t_\t_
2\tsees\tsee\tVERB\t_\t_\t0\troot\t_\t_
3\tno\tno\tDET\t_\tPolarity=Neg|PronType=Neg\t4\tdet\t_\t_
4-5\tfiles\t_\t_\t_\t_\t_\t_\t_\t_
4\tfile\tfile\tNOUN\t_\t_\t2\tobj\t_\t_
5\t.\t.\tPUNCT\t_\t_\t2\tpunct\t_\t_

1\tSystems\tsystem\tNOUN\t_\t_\t3\tnsubj:pass\t_\t_
2\tare\tbe\tAUX\t_\t_\t3\taux:pass\t_\t_
3\trun\trun\tVERB\t_\t_\t0\troot\t_\t_
"""
# The words of each sentence that have a feature, and the pairs of words.
FEATURES = [
    {"noun": [3], "verb": [1], "pronoun": [0], "subject": [0], "object": [3], "negation": [2]},
    {"noun": [0], "verb": [2], "subject": [0]},
]
WORDS = [["She", "sees", "no", "file", "."], ["Systems", "are", "run"]]
OF_PAIRS = [{"noun-pronoun": (3, 0), "verb-subject": (1, 0)}, {"verb-subject": (2, 0)}]


def test_attention_to_words_is_that_of_transformers(
    masked: Path, files: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.conllu").write_text(PARSED)
    words = ["--length", 16, "--examples", 3, "--out", tmp_path / "out"]
    printed = run(masked, files / "prose.txt", *words, "--parsed", tmp_path / "a.conllu")
    found = json.loads((tmp_path / "out/analysis.json").read_text())["linguistic"]
    assert found["sentences"] == 2
    expected = by_loops(masked)
    assert found["attention"].keys() == expected.keys()
    for kind, of_sentences in expected.items():
        assert found["attention"][kind]["sentences"] == len(of_sentences)
        means = np.mean(of_sentences, axis=0)
        np.testing.assert_allclose(found["attention"][kind]["heads"], means, atol=1e-5)
    assert "verb-subject" in printed
    assert "object, in 1 of 2 sentences" in (tmp_path / "out/analysis.html").read_text()


def by_loops(folder: Path) -> dict[str, list[np.ndarray]]:
    """[layers, heads] of each sentence that has a kind, from the maps that `transformers` has."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    read = AutoTokenizer.from_pretrained(folder)
    found: dict[str, list[np.ndarray]] = {}
    for words, features, pairs in zip(WORDS, FEATURES, OF_PAIRS, strict=True):
        encoded = read(words, is_split_into_words=True, return_tensors="pt")
        word_of = encoded.word_ids()
        with torch.no_grad():
            maps = model(**encoded, output_attentions=True).attentions
        weights = torch.cat(maps).numpy()  # [layers, heads, L, L]
        places = {
            name: [n for n, word in enumerate(word_of) if word in numbers]
            for name, numbers in features.items()
        }
        for name, tokens in {**places, "[CLS]": [0], "[SEP]": [len(word_of) - 1]}.items():
            found.setdefault(name, []).append(weights.mean(axis=2)[:, :, tokens].max(axis=-1))
            from_cls = weights[:, :, 0, tokens].max(axis=-1)
            found.setdefault(f"[CLS] to {name}", []).append(from_cls)
        for name, (one, other) in pairs.items():
            links = [
                weights[:, :, i, j]
                for i, first in enumerate(word_of)
                for j, second in enumerate(word_of)
                if (first, second) in ((one, other), (other, one))
            ]
            found.setdefault(name, []).append(np.max(links, axis=0))
    return found


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("a b\n", "a.conllu:1: has 1 column; CoNLL-U has 10"),
        ("1\tit\tit\tPRON\t_\t_\t_\tnsubj\t_\t_\n", "a.conllu:1: HEAD: '_' is neither a word of"),
        ("1\tit\tit\tPRON\t_\t_\t7\tnsubj\t_\t_\n", "a.conllu:1: HEAD: '7' is neither a word of"),
        ("\n", "a.conllu: holds no words"),
        ("".join(f"{n}\tit\tit\tX\t_\t_\t0\tx\t_\t_\n" for n in range(1, 80)), "more than 64 to"),
    ],
    ids=["columns", "unparsed", "outside", "empty", "long"],
)
def test_sentences_that_are_not_parsed(
    masked: Path, files: Path, tmp_path: Path, lines: str, message: str
) -> None:
    (tmp_path / "a.conllu").write_text(lines)
    words = ["--parsed", tmp_path / "a.conllu", "--out", tmp_path / "out"]
    assert message in refused(masked, files / "prose.txt", *words)


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
    too_long = refused(masked, prose, *out, "--length", 65, code=2)
    assert "--length 65: " in too_long
    assert "reads 64 tokens at most" in too_long
    assert "has 8 heads; leave it one" in refused(masked, prose, *out, "--prune", 8, code=2)
    task = ["single_sentence", f"data.train={files / 'moods.tsv'}", f"output_dir={tmp_path}"]
    task.append("data.sequence_length=32")
    assert "has no head for single_sentence" in refused(masked, *task, *out)
    (tmp_path / "others.tsv").write_text("text\tlabel\na\tx\nb\ty\n")
    others = [*task, f"data.train={tmp_path / 'others.tsv'}"]
    others += [f"data.validation={tmp_path / 'others.tsv'}"]
    assert "others.tsv:2: label: 'x' is not one of the labels: bad, good" in refused(
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
    assert "needs --disable zero" in refused(masked, prose, *uniform, code=2)
