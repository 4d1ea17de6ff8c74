"""`tandem data augment`: candidates that a model predicts, and the table that is written."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import configs
from configs.errors import UserError
from data_pipeline import DataError
from data_pipeline.augmentation.replacement import Replacement, Sentence
from data_pipeline.task_files.tables import read_table
from data_pipeline.tokenization.tokenizer import load
from model import EncoderConfig, ModelError, build, save_pretrained
from tests.conftest import tandem
from tests.damage import damages
from tests.failing import one_line
from trainer.augmentation import augmenting
from trainer.augmentation.augmenting import TableFile, augment
from trainer.augmentation.replacing import MaskedWords, Replacing
from trainer.config import JobConfig

CPU = torch.device("cpu")


class Constant(nn.Module):
    """Finds the same tokens most probable everywhere, and notes what it reads."""

    config = SimpleNamespace(longest_sequence=12)

    def __init__(self, best: list[int], vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.logits = torch.zeros(vocabulary)
        self.logits[best] = torch.arange(len(best), 0, -1).float()
        self.read: list[tuple] = []

    def forward(self, ids, segments, lengths, positions):
        self.read.append((ids, segments, lengths, positions))
        return SimpleNamespace(logits=self.logits.expand(len(positions), -1))


@pytest.mark.parametrize("beside", [True, False])
def test_a_masked_word_is_predicted_beside_its_sentence_or_alone(corpus, beside) -> None:
    tokenizer, vocabulary = load(corpus / "tokenizer")
    sentence = Sentence.read("the of and", tokenizer)
    ids = list(sentence.ids)
    assert [len(word.pieces) for word in sentence.words] == [1, 1, 1]
    inside = next(n for piece, n in tokenizer.get_vocab().items() if piece.startswith("##"))
    best = [inside, ids[2], vocabulary.mask, ids[0], ids[1]]
    model = Constant(best, vocabulary.vocab_size)
    masked = MaskedWords(model, tokenizer, vocabulary, 4, beside)
    assert masked.candidates([sentence], [[1, 2]]) == [{1: ["and", "the"], 2: ["and", "the"]}]
    ((read, segments, lengths, positions),) = model.read
    cls, sep, mask = vocabulary.cls, vocabulary.sep, vocabulary.mask
    second = [*ids, sep] if beside else []
    assert read.tolist() == [
        [cls, ids[0], mask, ids[2], sep, *second],
        [cls, ids[0], ids[1], mask, sep, *second],
    ]
    assert segments.tolist() == 2 * [5 * [0] + len(second) * [1]]
    assert lengths is None
    assert positions.tolist() == [2, len(read[0]) + 3]


def test_words_behind_the_longest_sequence_have_no_candidates(corpus) -> None:
    tokenizer, vocabulary = load(corpus / "tokenizer")
    sentence = Sentence.read(" ".join(["the"] * 12), tokenizer)
    model = Constant([sentence.ids[0]], vocabulary.vocab_size)
    found = MaskedWords(model, tokenizer, vocabulary, 1).candidates([sentence], [[0, 10, 11]])
    assert found == [{0: ["the"], 10: ["the"]}]
    assert model.read[0][0].shape[1] == 12


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("augmentation")
    config = EncoderConfig(
        vocab_size=600, hidden_size=16, layers=1, heads=2, ffn_size=16, max_positions=64
    )
    save_pretrained(build(config, seed=1), made / "model", corpus / "tokenizer")
    (made / "train.tsv").write_text(
        "text_a\ttext_b\tlabel\n"
        + "".join(f"his word number {n}\tthe water was the{'m' * n}\t{n % 2}\n" for n in range(5))
    )
    (made / "dev.tsv").write_text("text_a\ttext_b\tlabel\nx\ty\t0\nx\ty\t1\n")
    return made


def settings(folder: Path, **changes) -> Replacing:
    return Replacing(folder / "model", Replacement(**{"copies": 4, **changes}))


def job(folder: Path, *words: str) -> JobConfig:
    given = ["teacher.init.pretrained=x", f"data.root={folder}", "data.train=train.tsv"]
    words = (*given, "data.validation=dev.tsv", *words)
    return configs.load("sentence_pair", JobConfig, "task", words)


def test_a_table_holds_each_example_and_copies_of_either_text(folder, tmp_path) -> None:
    out = tmp_path / "more.tsv"
    rows, examples = augment(job(folder), settings(folder), out, CPU)
    columns = {name: name for name in ("text_a", "text_b", "label")}
    made = [row for _, row in read_table(str(out), columns)]
    given = [row for _, row in read_table(str(folder / "train.tsv"), columns)]
    assert (rows, examples) == (len(made), 5)
    assert [row for row in made if row in given] == given
    assert rows > 2 * examples
    number = -1
    for row in made:
        number += row in given
        known = given[number]
        assert row["label"] == known["label"]
        assert (row["text_a"] == known["text_a"]) + (row["text_b"] == known["text_b"]) >= 1
    told = json.loads((tmp_path / "more.tsv.json").read_text())
    assert (told["copies"], told["seed"], told["probability"]) == (4, 1, 0.4)
    assert {path.name for path in tmp_path.iterdir()} == {"more.tsv", "more.tsv.json"}


@contextmanager
def after_each_part(call: Callable[[int], None]) -> Iterator[None]:
    """Call this with the number of each part of a table that has been written."""
    write = augmenting.TableFile.write

    def write_and_call(table: augmenting.TableFile, part: int, *rows: object) -> None:
        write(table, part, *rows)
        call(part)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(augmenting.TableFile, "write", write_and_call)
        yield


def test_an_interrupted_table_is_resumed_alike(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(augmenting, "PART", 2)
    whole, again = tmp_path / "whole.tsv", tmp_path / "again.tsv"
    augment(job(folder), settings(folder), whole, CPU)

    def stop(part: int) -> None:
        if part == 1:
            raise KeyboardInterrupt

    with after_each_part(stop), pytest.raises(KeyboardInterrupt):
        augment(job(folder), settings(folder), again, CPU)
    assert not again.exists()
    with pytest.raises(DataError, match="was begun with other examples or settings"):
        augment(job(folder), settings(folder, seed=2), again, CPU)
    augment(job(folder), settings(folder), again, CPU)
    assert again.read_bytes() == whole.read_bytes()


def test_a_finished_table_is_found_again_and_no_other_is_replaced(
    folder, tmp_path, monkeypatch
) -> None:
    again = tmp_path / "again.tsv"
    with monkeypatch.context() as context:  # killed in the clean-up
        context.setattr(augmenting.shutil, "rmtree", lambda *asked, **how: None)
        context.setattr(augmenting.Path, "unlink", lambda *asked, **how: None)
        made = augment(job(folder), settings(folder), again, CPU)
    assert (tmp_path / ".again.tsv.part" / "000000.tsv").exists()
    assert augment(job(folder), settings(folder), again, CPU) == made
    assert not (tmp_path / ".again.tsv.part").exists()
    assert augment(job(folder), settings(folder), again, CPU) == made
    with pytest.raises(DataError, match=r"again\.tsv: exists"):
        augment(job(folder), settings(folder, seed=2), again, CPU)
    again.write_text(again.read_text() + "one\tmore\t1\n")
    with pytest.raises(DataError, match=r"again\.tsv: exists"):
        augment(job(folder), settings(folder), again, CPU)


def test_a_table_is_joined_without_holding_it(tmp_path) -> None:
    columns = {"text": "text", "label": "label"}
    rows = [{"text": f"{number} a\tb" * 40, "label": "1"} for number in range(500)]
    with TableFile.opened(tmp_path / "more.tsv", columns, {}) as table:
        for part in range(30):
            table.write(part, rows)
        tracemalloc.start()
        try:
            assert table.finish(30) == 15_000
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    text = (tmp_path / "more.tsv").read_text()
    assert text == "text\tlabel\n" + "".join(f"{n} a b" * 40 + "\t1\n" for n in range(500)) * 30
    assert peak < len(text) / 4


@pytest.mark.slow
def test_damaged_parts_are_made_again(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(augmenting, "PART", 2)
    whole, out = tmp_path / "whole.tsv", tmp_path / "more.tsv"
    augment(job(folder), settings(folder), whole, CPU)

    def stop(part: int) -> None:
        raise KeyboardInterrupt

    with after_each_part(stop), pytest.raises(KeyboardInterrupt):
        augment(job(folder), settings(folder), out, CPU)
    part = tmp_path / ".more.tsv.part" / "000000.tsv"
    interrupted, kept = part.read_bytes(), tmp_path / "kept"
    part.parent.rename(kept)
    for damage in damages(interrupted):
        shutil.copytree(kept, part.parent)
        damage.inflict(part)
        if damage.is_folder:
            with pytest.raises(OSError, match=r"000000\.tsv"):
                augment(job(folder), settings(folder), out, CPU)
            shutil.rmtree(part.parent)
            continue
        augment(job(folder), settings(folder), out, CPU)
        assert out.read_bytes() == whole.read_bytes(), damage.name
        out.unlink()


def test_two_at_once_do_not_write_one_table(folder, tmp_path) -> None:
    out, refusals = tmp_path / "more.tsv", []

    def begin_another(part: int) -> None:
        with pytest.raises(DataError, match=r"more\.tsv: another process is writing it") as refusal:
            augment(job(folder), settings(folder), out, CPU)
        refusals.append(refusal)

    with after_each_part(begin_another):
        rows, _ = augment(job(folder), settings(folder), out, CPU)
    assert refusals
    assert len(out.read_text().splitlines()) == rows + 1


def test_what_a_finished_table_left_is_not_part_of_the_next_one(folder, tmp_path) -> None:
    out, left = tmp_path / "more.tsv", tmp_path / ".more.tsv.part"
    left.mkdir()
    (left / "000000.tsv").write_text("of other settings\n")
    augment(job(folder), settings(folder), out, CPU)
    assert "of other settings" not in out.read_text()


def test_rows_without_copies_are_counted(folder, tmp_path, caplog) -> None:
    (blank := tmp_path / "blank.tsv").write_text("text_a\ttext_b\tlabel\nx\ty\t0\n\n\nx\ty\t1\n")
    _, examples = augment(
        job(folder, f"data.train={blank}"), settings(folder), tmp_path / "more.tsv", CPU
    )
    assert examples == 2
    assert f"{blank}: leaves out 2 blank rows; {blank}:3; {blank}:4" in caplog.text


def test_only_the_first_examples_are_augmented(folder, tmp_path) -> None:
    few = job(folder, "data.max_trained=2")
    _, examples = augment(few, settings(folder), tmp_path / "few.tsv", CPU)
    assert examples == 2


def test_columns_by_number_stay_where_they_are(folder, tmp_path) -> None:
    numbered = tmp_path / "numbered.tsv"
    numbered.write_text("id\t1\tthe water\n")
    out = tmp_path / "more.tsv"
    word = "data.columns={text: 3, label: 2}"
    one = configs.load(
        "single_sentence",
        JobConfig,
        "task",
        ["teacher.init.pretrained=x", f"data.train={numbered}", "data.validation=x.tsv", word],
    )
    augment(one, settings(folder), out, CPU)
    assert out.read_text().splitlines()[0] == "-\t1\tthe water"
    assert len(out.read_text().splitlines()) > 1


def test_word_vectors_give_candidates_of_words_of_several_pieces(folder, tmp_path) -> None:
    glove = tmp_path / "glove.txt"
    glove.write_text("themmmm 1 0\nstone 1 0.1\nriver 0 1\n")
    how = Replacing(folder / "model", Replacement(copies=30), 1, glove)
    augment(job(folder), how, tmp_path / "more.tsv", CPU)
    assert "stone" in (tmp_path / "more.tsv").read_text()


@pytest.mark.parametrize(
    ("words", "out", "message"),
    [
        (["data.validation=''"], "more.tsv", r"data\.validation: must be set"),
        ([], "more.csv", r"must end in \.tsv"),
        (["data.train=none.tsv"], "more.tsv", r"none\.tsv: cannot be read"),
    ],
)
def test_what_cannot_be_augmented_is_refused(folder, tmp_path, words, out, message) -> None:
    with pytest.raises(UserError, match=message):
        augment(job(folder, *words), settings(folder), tmp_path / out, CPU)


def test_tasks_of_other_files_and_models_of_no_words_are_refused(folder, corpus, tmp_path) -> None:
    given = ["teacher.init.pretrained=x", "data.train=x", "data.validation=x"]
    tagging = configs.load("tagging", JobConfig, "task", given)
    with pytest.raises(DataError, match="tagging: does not read texts from tables"):
        augment(tagging, settings(folder), tmp_path / "more.tsv", CPU)
    config = EncoderConfig(
        vocab_size=600, hidden_size=16, layers=1, heads=2, ffn_size=16, max_positions=64
    ).without_mlm_head()
    save_pretrained(build(config, seed=1), tmp_path / "model", corpus / "tokenizer")
    with pytest.raises(ModelError, match="has no masked-LM head"):
        augment(job(folder), settings(tmp_path), tmp_path / "more.tsv", CPU)


def test_the_command_writes_a_table_or_says_in_one_line_why_not(folder, tmp_path) -> None:
    files = [f"data.root={folder}", "data.train=train.tsv"]
    options = ["--model", folder / "model", "--out", tmp_path / "more.tsv", "--copies", "2"]
    words = ["sentence_pair", *files, *options]
    refused = tandem("data", "augment", *words)
    assert refused.returncode == 1
    assert "data.validation: must be set" in one_line(refused.stderr)
    done = tandem("data", "augment", *words, "data.validation=dev.tsv")
    assert done.returncode == 0, done.stderr
    assert "examples, made of 5, are in" in done.stdout
    assert json.loads((tmp_path / "more.tsv.json").read_text())["copies"] == 2


def test_as_many_copies_are_made_as_by_tinyberts_code(folder, tmp_path) -> None:
    """30 of MRPC, CoLA, RTE and STS-B; every word may be replaced, so that few come out alike."""
    words = ["mrpc", f"data.root={folder}", "data.train=train.tsv", "data.validation=dev.tsv"]
    words += ["data.columns={text_a: text_a, text_b: text_b, label: label}"]
    words += ["--model", folder / "model", "--probability", "1", "--candidates", "600"]
    done = tandem("data", "augment", *words, "--out", tmp_path / "more.tsv")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "more.tsv.json").read_text())["copies"] == 30
    rows = [
        row for _, row in read_table(str(tmp_path / "more.tsv"), {"a": "text_a", "b": "text_b"})
    ]
    first = rows[0]
    copies = [row for row in rows[1:] if row["b"] == first["b"] and row["a"] != first["a"]]
    assert 20 < len(copies) <= 30


def test_texts_of_another_language_are_told_and_take_its_stop_words(
    folder, tmp_path, caplog
) -> None:
    (tmp_path / "train.tsv").write_text(
        "text_a\ttext_b\tlabel\n" + "der fluss rauscht leise\tein haus am fluss\t1\n" * 3
    )
    given = job(folder, f"data.train={tmp_path / 'train.tsv'}")
    augment(given, settings(folder), tmp_path / "english.tsv", CPU)
    assert "the texts do not look English" in caplog.text
    assert "--stop-words FILE" in caplog.text
    caplog.clear()
    (tmp_path / "stop.txt").write_text("der\nein\nAm\nfluss\n")
    how = dataclasses.replace(settings(folder), stop_words=tmp_path / "stop.txt")
    augment(given, how, tmp_path / "german.tsv", CPU)
    assert "English" not in caplog.text
    rows = (tmp_path / "german.tsv").read_text().splitlines()[1:]
    assert all(row.count("fluss") >= 2 for row in rows)
    assert "stop_words" in json.loads((tmp_path / "german.tsv.json").read_text())
    (tmp_path / "empty.txt").write_text("\n")
    how = dataclasses.replace(how, stop_words=tmp_path / "empty.txt")
    with pytest.raises(DataError, match=r"empty\.txt: holds no words"):
        augment(given, how, tmp_path / "none.tsv", CPU)
