"""`data build --near-duplicates`: what is dropped, and that it is always the same."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest

from configs.errors import OptionError
from data_pipeline import BuildOptions, DataError, build
from data_pipeline.building import build as building
from data_pipeline.building import merging
from data_pipeline.building.checking import check
from data_pipeline.building.near_duplicates import NearDuplicates, Signer, bands_for
from data_pipeline.building.reporting import summary
from data_pipeline.text.documents import Problem
from tests.data_pipeline.conftest import WORDS, make_documents
from tests.data_pipeline.test_build import contents
from tests.data_pipeline.test_merge import texts
from tests.thorough import IS_THOROUGH

OPTIONS: dict = {"shard_mb": 0.02, "block_bytes": 4000, "val_fraction": 0.15}
LIST = "near_duplicates.jsonl"


def changed(document: str, words: int, seed: int = 0) -> str:
    """The document with this many of its words replaced, next to each other."""
    parts = document.split()
    at = random.Random(seed).randrange(len(parts) - words)
    return " ".join([*parts[:at], *(f"other{seed}" for _ in range(words)), *parts[at + words :]])


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two files with copies and near copies within and across them, some of near copies."""
    monkeypatch.setattr("data_pipeline.text.documents.CHUNK_BYTES", 3000)
    first = [one for one in make_documents(60) if len(one.split()) > 60]
    second = [one for one in make_documents(40, 1) if len(one.split()) > 60]
    near = [changed(one, 2, number) for number, one in enumerate(first)]
    nearer = [changed(one, 2, number + 100) for number, one in enumerate(near)]
    (tmp_path / "a.txt").write_text("\n\n".join([*first, *near[::3], *first[:5]]))
    rows = [*second, *nearer, *near[::3], *second[:4], *map(str.upper, second[:4])]
    lines = [json.dumps({"text": row}) for row in random.Random(0).sample(rows, len(rows))]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    return [str(tmp_path / name) for name in ("a.txt", "b.jsonl")]


def listed(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / LIST).read_text().splitlines()]


def runs(text: str) -> set[tuple[str, ...]]:
    words = text.lower().replace(".", "").split()
    return {tuple(words[at : at + 5]) for at in range(len(words) - 4)}


def test_estimates_are_near_the_similarity_of_runs_of_words() -> None:
    for document in make_documents(30, 3, sentences=40):
        other = changed(document, 5) if len(document.split()) > 60 else document.upper()
        records = Signer()([document, other], [Problem("", 0, "")] * 2)
        near = NearDuplicates(0.5)
        expected = len(runs(document) & runs(other)) / len(runs(document) | runs(other))
        assert [near.is_new(record, "in.txt") for record in records] == [True, False]
        assert near.dropped[0]["similarity"] == pytest.approx(expected, abs=0.13)


@pytest.mark.parametrize("threshold", [0.5, 0.65, 0.8, 0.95, 1.0])
def test_bands_find_documents_at_the_threshold(threshold: float) -> None:
    bands, rows = bands_for(threshold)
    assert bands * rows <= 128
    assert 1 - (1 - threshold**rows) ** bands >= 0.99


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("วันนี้อากาศดีมากเราไปเดินเล่นที่สวนสาธารณะกันเถอะ" * 3, "นะ"),
        ("今日は天気がいいので、公園を散歩しましょう。" * 3, "ね"),
        ("यह एक लंबा वाक्य है जिसमें बहुत सारे शब्द हैं और वह आगे बढ़ता है " * 3, "नहीं"),
    ],
)
def test_text_of_any_script_has_words(text: str, other: str) -> None:
    """Where it writes no spaces, each letter is one: all else would be a single word."""
    texts = [text, f"{text} {other}", text[: len(text) // 9] + text[::-1]]
    near = NearDuplicates(0.6)
    records = Signer()(texts, [Problem("", at, "") for at in range(3)])
    assert [near.is_new(record, "in.txt") for record in records] == [True, False, True]


def test_short_texts_without_words_are_told_apart() -> None:
    texts = ["!!!", "???", "one two", "one two three", "One, two!", ""]
    near = NearDuplicates(0.8)
    records = Signer()(texts, [Problem("", at, "") for at in range(len(texts))])
    kept = [near.is_new(record, "in.txt") for record in records]
    assert kept == [True, True, True, True, False, True]


def test_near_duplicates_are_dropped_counted_and_listed(
    tmp_path: Path, inputs: list[str], tokenizer_dir: Path
) -> None:
    arguments = inputs, str(tokenizer_dir)
    plain = build(BuildOptions(*arguments, **OPTIONS), str(tmp_path / "plain"))
    options = BuildOptions(*arguments, near_duplicates=0.7, **OPTIONS)
    tree = build(options, str(tmp_path / "out"))
    dropped = listed(tmp_path / "out")
    assert len(dropped) == tree["tally"]["near_duplicates"] > 20
    assert tree["tally"]["documents"] + len(dropped) == plain["tally"]["documents"]
    assert f"{len(dropped)} near-duplicates dropped ({LIST} lists them)" in summary(tree)
    assert "near-duplicate" not in summary(plain)
    assert not (tmp_path / "plain" / LIST).exists()
    for line in dropped:
        assert 0.7 <= line["similarity"] <= 1.0
        for place in (line, line["kept"]):
            data = Path(place["file"]).read_bytes()
            row = data.splitlines()[place["row"] - 1] if "row" in place else data[place["byte"] :]
            assert place["text"].split()[0].encode() in row.split(b"\n\n")[0]
    assert check(str(tmp_path / "out")) == []
    assert build(options, str(tmp_path / "out")) == tree


@pytest.mark.slow
def test_workers_and_interruptions_change_no_byte(
    tmp_path: Path, inputs: list[str], tokenizer_dir: Path, monkeypatch
) -> None:
    options = BuildOptions(inputs, str(tokenizer_dir), near_duplicates=0.7, **OPTIONS)
    whole = build(options, str(tmp_path / "whole"))
    assert build(options, str(tmp_path / "workers"), workers=2) == whole
    monkeypatch.setattr(building, "JOURNAL_SECONDS", -1.0)
    take = building._Build._take
    for stop in (2, 3, 7) if IS_THOROUGH else (3,):

        def killed(self, chunk, stop=stop):
            take(self, chunk)
            if self.tally.chunks > stop:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(building._Build, "_take", killed)
            with pytest.raises(KeyboardInterrupt):
                build(options, str(tmp_path / "parts"))
    assert build(options, str(tmp_path / "parts")) == whole
    assert contents(tmp_path / "whole") == contents(tmp_path / "workers")
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_slices_and_an_interrupted_merge_drop_what_one_build_drops(
    tmp_path: Path, inputs: list[str], tokenizer_dir: Path, monkeypatch
) -> None:
    arguments = inputs, str(tokenizer_dir)
    options = {**OPTIONS, "near_duplicates": 0.7}
    whole = build(BuildOptions(*arguments, **options), str(tmp_path / "whole"))
    for task in range(4):
        build(BuildOptions(*arguments, task=task, tasks=4, **options), str(tmp_path / "out"))
    rewrite = merging._rewrite

    def ended(*arguments) -> None:
        rewrite(*arguments)
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(merging, "_rewrite", ended)
            with pytest.raises(KeyboardInterrupt):
                merging.merge(str(tmp_path / "out"))
    merged = merging.merge(str(tmp_path / "out"))
    assert texts(tmp_path / "out") == texts(tmp_path / "whole")
    for name in ("documents", "duplicates", "near_duplicates"):
        assert merged["tally"][name] == whole["tally"][name], name
    assert listed(tmp_path / "out") == listed(tmp_path / "whole")
    assert check(str(tmp_path / "out")) == []
    assert not (tmp_path / "out" / "signatures.bin").exists()


def test_a_file_s_name_may_be_no_utf_8(tmp_path: Path, tokenizer_dir: Path) -> None:
    """A build of such a file ended, when all was done, in a UnicodeEncodeError."""
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    document = max(make_documents(20), key=len)
    path.write_text(f"{document}\n\n{changed(document, 1)}\n")
    options = BuildOptions([str(path)], str(tokenizer_dir), near_duplicates=0.5, **OPTIONS)
    build(options, str(tmp_path / "out"))
    (dropped,) = listed(tmp_path / "out")
    assert dropped["file"] == dropped["kept"]["file"] == str(path)


def test_mistakes_are_one_line(tmp_path: Path, tokenizer_dir: Path, monkeypatch) -> None:
    text = tmp_path / "in.txt"
    text.write_text(" ".join(WORDS))
    arguments = [str(text)], str(tokenizer_dir)
    with pytest.raises(OptionError, match=r"--near-duplicates: must be from 0\.5 to 1"):
        BuildOptions(*arguments, near_duplicates=0.2)
    with pytest.raises(OptionError, match="--keep-duplicates: --near-duplicates drops these too"):
        BuildOptions(*arguments, near_duplicates=0.8, drop_duplicates=False)
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(
        DataError, match=r"datasketch: is missing, .*: pip install '.*\[duplicates\]'"
    ):
        build(BuildOptions(*arguments, near_duplicates=0.8), str(tmp_path / "out"), workers=2)
    assert not (tmp_path / "out").exists()
