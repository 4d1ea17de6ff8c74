"""Parts built by an array of tasks give the documents and order of a single build."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline import BuildOptions, Corpus, DataError, build
from data_pipeline.building.checking import check
from data_pipeline.building.journal import Claims
from data_pipeline.building.merging import documents, merge
from data_pipeline.text.documents import PROBLEMS_SHOWN
from tests.data_pipeline.conftest import make_documents

OPTIONS: dict = {"shard_mb": 0.02, "block_bytes": 4000, "val_fraction": 0.15}


def texts(folder: Path) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    corpus = Corpus.open(str(folder))
    return {
        name: [
            (tuple(document.tokens.tolist()), tuple(document.sentences.tolist()))
            for document in documents(corpus.split(name))
        ]
        for name in ("train", "val")
    }


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Text, JSON lines and a compressed file, with duplicates within and across tasks."""
    monkeypatch.setattr("data_pipeline.text.documents.CHUNK_BYTES", 3000)
    first, second, third = make_documents(90), make_documents(60, 1), make_documents(30, 2)
    (tmp_path / "a.txt").write_text("\n\n \n\n".join(first + second[:9]))
    (tmp_path / "b.jsonl").write_text(
        "\n".join(json.dumps({"text": one}) for one in second + first[::7])
    )
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("\n\n".join(third + third[:3] + first[:2]))
    return [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.txt.gz")]


@pytest.mark.parametrize(("tasks", "first"), [(2, 0), (3, 1), (11, 0)])
def test_tasks_and_merge_equal_one_build(
    tmp_path: Path, inputs: list[str], tokenizer_dir: Path, tasks: int, first: int
) -> None:
    """Slices may be numbered from 0 or from 1."""
    whole = build(BuildOptions(inputs, str(tokenizer_dir), **OPTIONS), str(tmp_path / "whole"))
    for task in reversed(range(first, tasks + first)):
        options = BuildOptions(inputs, str(tokenizer_dir), task=task, tasks=tasks, **OPTIONS)
        build(options, str(tmp_path / "merged"))
    merged = merge(str(tmp_path / "merged"))
    assert texts(tmp_path / "merged") == texts(tmp_path / "whole")
    assert check(str(tmp_path / "merged")) == []
    for name in ("documents", "duplicates", "problems", "tokens_per_document"):
        assert merged["tally"][name] == whole["tally"][name], name
    assert merge(str(tmp_path / "merged")) == merged
    assert not (tmp_path / "merged" / "parts").exists()


def test_the_shards_of_a_part_are_claimed_at_once(
    tmp_path: Path, inputs: list[str], tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each claim waits for the disk, and a corpus has up to 100,000 shards."""
    for task in range(2):
        every: dict = {
            "task": task,
            "tasks": 2,
            "drop_duplicates": False,
        }  # no part is written again
        build(BuildOptions(inputs, str(tokenizer_dir), **every, **OPTIONS), str(tmp_path))
    claimed: list[int] = []
    add = Claims.add

    def noted(claims: Claims, *paths: Path) -> None:
        claimed.append(sum(path.suffix == ".tar" for path in paths))
        add(claims, *paths)

    monkeypatch.setattr(Claims, "add", noted)
    shards = merge(str(tmp_path))["splits"]["train"]["shards"]
    assert shards > 4
    assert sum(claimed) > shards
    assert len([*filter(None, claimed)]) == 4  # of two parts with two splits each


def test_a_missing_part_is_named(tmp_path: Path, inputs: list[str], tokenizer_dir: Path) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(DataError, match="holds no parts"):
        merge(out)
    build(BuildOptions(inputs, str(tokenizer_dir), task=0, tasks=3, **OPTIONS), out)
    build(BuildOptions(inputs, str(tokenizer_dir), task=2, tasks=3, **OPTIONS), out)
    with pytest.raises(DataError, match="--task 1/3"):
        merge(out)


def test_slices_of_different_text_are_not_merged(
    tmp_path: Path, inputs: list[str], tokenizer_dir: Path
) -> None:
    """Their files may stand in another folder: nodes may name it differently."""
    copies = [tmp_path / "copies" / Path(path).name for path in inputs]
    copies[0].parent.mkdir()
    for path, copy in zip(inputs, copies, strict=True):
        copy.write_bytes(Path(path).read_bytes())
    for name, others in {"same": copies, "fewer": inputs[:2]}.items():
        out = tmp_path / name
        build(BuildOptions(inputs, str(tokenizer_dir), task=0, tasks=2, **OPTIONS), str(out))
        named = [str(one) for one in others]
        build(BuildOptions(named, str(tokenizer_dir), task=1, tasks=2, **OPTIONS), str(out))
    assert "text" not in merge(str(tmp_path / "same"))["identity"]
    with pytest.raises(DataError, match="00001-of-00002: is a slice of another TEXT than 00000"):
        merge(str(tmp_path / "fewer"))


def test_a_merge_that_was_ended_goes_on(
    tmp_path: Path, inputs: list[str], tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    whole = build(BuildOptions(inputs, str(tokenizer_dir), **OPTIONS), str(tmp_path / "whole"))
    for task in range(4):
        build(BuildOptions(inputs, str(tokenizer_dir), task=task, tasks=4, **OPTIONS), str(out))
    import data_pipeline.building.merging as merging

    def ended(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for name in ("_join_split", "finish_folder", "write_index"):
        with monkeypatch.context() as patch:
            patch.setattr(merging, name, ended)
            with pytest.raises(KeyboardInterrupt):
                merge(str(out))
    assert merge(str(out))["tally"]["duplicates"] == whole["tally"]["duplicates"]
    assert texts(out) == texts(tmp_path / "whole")
    assert check(str(out)) == []


def test_a_slice_that_was_ended_in_its_last_step_goes_on(
    tmp_path: Path, inputs: list[str], tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digests had left the journal already, whose state counts them."""

    def ended(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("data_pipeline.building.build.JOURNAL_SECONDS", 0.0)
    options = BuildOptions(inputs, str(tokenizer_dir), task=0, tasks=2, near_duplicates=0.8)
    with monkeypatch.context() as patch:
        patch.setattr("data_pipeline.building.build.finish_folder", ended)
        with pytest.raises(KeyboardInterrupt):
            build(options, str(tmp_path / "ended"))
    whole = build(options, str(tmp_path / "whole"))
    assert build(options, str(tmp_path / "ended")) == whole


@pytest.mark.parametrize("last", ["corpus.json", "tokenizer", "00001-of-00002"])
def test_a_merge_that_was_ended_while_it_removed_a_part_leaves_no_folder(
    tmp_path: Path,
    inputs: list[str],
    tokenizer_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: str,
) -> None:
    for task in range(2):
        build(BuildOptions(inputs, str(tokenizer_dir), task=task, tasks=2), str(tmp_path))
    with monkeypatch.context() as patch:
        for remove in ("unlink", "rmdir"):
            patch.setattr(Path, remove, _ended_at(last, getattr(Path, remove)))
        with pytest.raises(KeyboardInterrupt):
            merge(str(tmp_path))
    merge(str(tmp_path))
    assert not (tmp_path / "parts").exists()


def _ended_at(last: str, remove: Callable[..., None]) -> Callable[..., None]:
    """`remove`, interrupted before it removes a file or folder of this name."""

    def removed(path: Path, **options: bool) -> None:
        if path.name == last:
            raise KeyboardInterrupt
        remove(path, **options)

    return removed


def test_a_merge_leaves_no_folder_and_shows_few_problems(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    """Folders of other tokenizers stayed; each task added its own first 20 problems."""
    bad = b"".join(b"\xff %d\n\n" % number for number in range(15))
    for number in range(2):
        good = "\n\n".join(make_documents(30, number)).encode()
        (tmp_path / f"{number}.txt").write_bytes(bad + good)
    inputs, out = [str(tmp_path / f"{number}.txt") for number in range(2)], tmp_path / "out"
    for task in range(2):
        options = BuildOptions(
            inputs, str(tokenizer_dir), task=task, tasks=2, also=[str(tokenizer_dir)], **OPTIONS
        )
        build(options, str(out))
    tally = merge(str(out))["tally"]
    assert not (out / "parts").exists()
    assert (tally["problems"], len(tally["first_problems"])) == (30, PROBLEMS_SHOWN)


def test_parts_beside_a_finished_corpus_are_neither_built_nor_lost(
    tmp_path: Path, inputs: list[str], tokenizer_dir: Path
) -> None:
    out, late = tmp_path / "out", tmp_path / "late"
    arguments = (inputs, str(tokenizer_dir))
    whole = build(BuildOptions(*arguments, **OPTIONS), str(out))
    with pytest.raises(DataError, match="out: already holds a corpus"):
        build(BuildOptions(*arguments, task=0, tasks=2, **OPTIONS), str(out))
    for task in range(2):
        build(BuildOptions(*arguments, task=task, tasks=2, **OPTIONS), str(late))
    (late / "parts").rename(out / "parts")
    with pytest.raises(DataError, match="out: holds both a corpus and parts"):
        merge(str(out))
    (out / "parts").rename(late / "parts")
    assert merge(str(late))["tally"]["documents"] == whole["tally"]["documents"]
