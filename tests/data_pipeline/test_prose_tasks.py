"""The tasks made from prose: readable as task files, and correct by their own rules."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from data_pipeline.task_files.conll import read_conll
from data_pipeline.task_files.prose_tasks import OTHER_NUMBER, TRAIN, VALIDATION, documents, main
from data_pipeline.task_files.tables import read_table
from trainer.evaluation.minimal_pairs import read_minimal_pairs


@pytest.fixture(scope="module")
def made(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tasks")
    main([str(text), "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def sentences(text: Path) -> list[list[str]]:
    return list(documents(str(text)))


def rows(made: Path, name: str, *fields: str) -> list[dict[str, str]]:
    return [row for _, row in read_table(str(made / name), {field: field for field in fields})]


def test_the_same_text_gives_the_same_files(made: Path, text: Path, tmp_path: Path) -> None:
    main([str(text), "--out", str(tmp_path)])
    ours, theirs = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (made, tmp_path)
    )
    assert ours == theirs


def test_shuffled_sentences_have_the_same_words(made: Path, sentences: list[list[str]]) -> None:
    written = {one for document in sentences for one in document}
    bags = {tuple(sorted(one.split())) for one in written}
    labels = Counter()
    for row in rows(made, f"order_{TRAIN}.tsv", "text", "label"):
        labels[row["label"]] += 1
        assert (row["text"] in written) == (row["label"] == "written")
        assert tuple(sorted(row["text"].split())) in bags
    assert min(labels.values()) > 0.4 * sum(labels.values())


def test_neighbours_follow_each_other(made: Path, sentences: list[list[str]]) -> None:
    following = {pair for one in sentences for pair in pairwise(one)}
    labels = Counter()
    for row in rows(made, f"neighbours_{TRAIN}.tsv", "text_a", "text_b", "label"):
        labels[row["label"]] += 1
        assert ((row["text_a"], row["text_b"]) in following) == (row["label"] == "yes")
    assert min(labels.values()) > 0.4 * sum(labels.values())


def test_capitals_are_hidden_and_tagged(made: Path) -> None:
    found = list(read_conll(str(made / f"capitals_{TRAIN}.txt")))
    tags = Counter(tag for one in found for tag in one.tags)
    assert set(tags) == {"O", "B-CAP", "I-CAP"}
    assert all(one.tags[0] == "O" for one in found)
    assert all(word == word.lower() for one in found for word in one.words)


def test_pairs_differ_as_their_phenomenon_says(made: Path) -> None:
    phenomena = Counter()
    for pair in read_minimal_pairs(str(made / "pairs.jsonl")):
        phenomena[pair.phenomenon] += 1
        good, bad = pair.good.split(), pair.bad.split()
        changed = [number for number in range(len(good)) if good[number] != bad[number]]
        if pair.phenomenon == "agreement":
            (at,) = changed
            assert OTHER_NUMBER[good[at]] == bad[at]
        else:
            assert sorted(good) == sorted(bad)
            assert changed == [changed[0], changed[0] + 1]
    assert min(phenomena["agreement"], phenomena["word order"]) >= 10


def test_train_and_validation_share_no_document(made: Path) -> None:
    train, validation = (
        {row["text_a"] for row in rows(made, f"neighbours_{split}.tsv", "text_a")}
        for split in (TRAIN, VALIDATION)
    )
    assert train.isdisjoint(validation)
    assert validation


def test_pairs_are_as_many_as_asked_for(text: Path, tmp_path: Path) -> None:
    main([str(text), "--out", str(tmp_path), "--pairs", "7"])
    pairs = read_minimal_pairs(str(tmp_path / "pairs.jsonl"))
    assert Counter(pair.phenomenon for pair in pairs) == {"agreement": 7, "word order": 7}


def test_a_text_of_which_no_tasks_can_be_made_is_one_line(tmp_path: Path, capsys) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    for name, why in (("short.txt", "has no sentence of 6 to 30 words"), ("none.txt", "no such")):
        with pytest.raises(SystemExit) as ended:
            main([str(tmp_path / name), "--out", str(tmp_path / "out")])
        assert ended.value.code == 1
        assert f"{name}: {why}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "short.txt"), "--out", str(tmp_path / "out"), "--pairs", "-1"])
    assert not (tmp_path / "out").exists()
