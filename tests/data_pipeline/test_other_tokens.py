"""The same text by two tokenizers: aligned spans, and rows of the same spans of documents."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import (
    DEFAULT_VIEW,
    MASKED,
    BatchStream,
    BuildOptions,
    Corpus,
    DataConfig,
    MaskingConfig,
    build,
)
from data_pipeline.building.checking import check
from data_pipeline.building.merging import documents, merge
from data_pipeline.packing.kinds import PACKINGS
from data_pipeline.reading.batches import Batch, shared_view
from data_pipeline.reading.other_tokens import OtherView
from data_pipeline.shards.blocks import Block, OtherTokens, decode_block, encode_block, joined
from data_pipeline.tokenization.alignment import aligned_spans
from data_pipeline.tokenization.training import train
from tests.data_pipeline.conftest import make_documents

BOTH = shared_view(DEFAULT_VIEW, "other")
OPTIONS: dict = {"val_fraction": 0.1, "shard_mb": 0.02, "block_bytes": 2000}


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    out = tmp_path_factory.mktemp("byte_level")
    train([str(text_file)], "bpe", 300, str(out))
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, text_file: Path, tokenizer_dir: Path, byte_level: Path) -> Corpus:
    folder = tmp_path_factory.mktemp("both")
    options = BuildOptions([str(text_file)], str(tokenizer_dir), also=[str(byte_level)], **OPTIONS)
    build(options, str(folder))
    return Corpus.open(str(folder))


def tokenizer(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def stream(corpus: Corpus, rank: int = 0, ranks: int = 1, longest=None, **options) -> BatchStream:
    config = DataConfig(**({"path": "unused", "sequence_length": 64} | options))
    views = {"other": OtherView([0], corpus.others[0], longest)}
    return BatchStream(corpus.split("train"), config, 1, 12, rank, ranks, views=views)


def places(offsets, text: str) -> list[tuple[int, int]]:
    """Where tokens stand, without the spaces that they hold."""
    inside = [text[start:end] for start, end in offsets]
    return [
        (start + len(part) - len(part.lstrip()), start + len(part.rstrip()))
        for (start, _), part in zip(offsets, inside, strict=True)
    ]


def test_spans_of_one_token_each_are_those_that_begin_and_end_together(
    tokenizer_dir: Path, byte_level: Path
) -> None:
    """By the tokenizers' own offsets."""
    first, second = tokenizer(tokenizer_dir), tokenizer(byte_level)
    for text in make_documents(20, seed=5):
        ours, theirs = (t.encode(text, add_special_tokens=False) for t in (first, second))
        sizes = aligned_spans(np.array(ours.offsets), np.array(theirs.offsets), len(text))
        assert sizes[0].sum() == len(ours)
        assert sizes[1].sum() == len(theirs)
        begins = [np.cumsum(part) - part for part in sizes]
        alone = (sizes[0] == 1) & (sizes[1] == 1)
        left, right = (places(it.offsets, text) for it in (ours, theirs))
        aligned = {left[at] for at in begins[0][alone]}
        assert aligned == {right[at] for at in begins[1][alone]}
        assert aligned == {place for place in set(left) & set(right) if place[0] < place[1]}


@pytest.mark.parametrize(
    ("ours", "theirs", "sizes"),
    [
        ([(0, 2), (2, 4)], [(0, 1), (1, 3), (3, 4)], ([2], [3])),  # ab|cd and a|bc|d
        (
            [(0, 2), (3, 5)],
            [(0, 2), (2, 3), (3, 5)],
            ([1, 0, 1], [1, 1, 1]),
        ),  # the space is a token
        ([(0, 1), (0, 1), (1, 2)], [(0, 1), (1, 2)], ([2, 1], [1, 1])),  # two bytes of a sign
        ([(0, 2)], [(3, 5)], ([1, 0], [0, 1])),  # nothing in common
        ([], [(0, 2)], ([0], [1])),
        ([], [], ([], [])),
    ],
)
def test_spans_of_odd_texts(ours, theirs, sizes) -> None:
    read = (np.array(places, np.int64).reshape(-1, 2) for places in (ours, theirs))
    found = aligned_spans(*read, 5)
    assert tuple(part.tolist() for part in found) == sizes


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1), st.data())
def test_a_document_is_cut_at_one_place_in_both(spans, data) -> None:
    ours, theirs = np.array(spans).T
    cut = data.draw(st.integers(0, int(ours.sum())))
    other = OtherTokens.of(np.arange(theirs.sum(), dtype=np.uint16), ours, theirs)
    head, rest = other.cut(cut)
    assert (head.ours.sum(), rest.ours.sum()) == (cut, ours.sum() - cut)
    kept = [*head.tokens, *rest.tokens]
    torn = [
        token
        for before, after, first, size in zip(
            np.cumsum(ours) - ours, np.cumsum(ours), np.cumsum(theirs) - theirs, theirs, strict=True
        )
        if before < cut < after
        for token in range(first, first + size)
    ]
    assert kept == [token for token in other.tokens if token not in torn]
    for part in (head, rest):
        assert part.theirs.sum() == len(part.tokens)
        assert part.spans.tolist() == [len(part.ours)]


def test_blocks_of_both_come_back_from_their_bytes(corpus: Corpus) -> None:
    split = corpus.split("train")
    block = joined([split.read_block(number) for number in range(3)])
    again = decode_block(encode_block("block-000000000", block))
    assert block.adds_up
    assert again.adds_up
    assert block.others[0].ours.dtype == np.uint8
    for name, array in block.arrays.items():
        np.testing.assert_array_equal(array, again.arrays[name])
    plain = dataclasses.replace(block, others=())
    assert decode_block(encode_block("block-000000000", plain)).others == ()
    assert check(str(corpus.folder)) == []


def of_document(document: Block) -> list[list[int]]:
    return [array.tolist() for array in document.arrays.values()]


@pytest.mark.slow
def test_workers_and_slices_change_nothing(
    corpus: Corpus, text_file: Path, tokenizer_dir: Path, byte_level: Path, tmp_path: Path
) -> None:
    folders = "several", "sliced"
    common: dict = {"also": [str(byte_level)], **OPTIONS}
    inputs = [str(text_file), str(text_file)]
    options = BuildOptions(inputs[:1], str(tokenizer_dir), **common)
    build(options, str(tmp_path / folders[0]), workers=2)
    for task in range(3):
        sliced = BuildOptions(inputs, str(tokenizer_dir), task=task, tasks=3, **common)
        build(sliced, str(tmp_path / folders[1]))
    merge(str(tmp_path / folders[1]))
    for folder in folders:
        made = Corpus.open(str(tmp_path / folder))
        assert made.number_of(byte_level) == 0
        for split in ("train", "val"):
            ours, theirs = (documents(it.split(split)) for it in (corpus, made))
            assert list(map(of_document, ours)) == list(map(of_document, theirs))


def surface(tokens: tokenizers.Tokenizer, ids: np.ndarray) -> str:
    pieces = [tokens.id_to_token(number) for number in ids]
    return "".join(piece.removeprefix("##").removeprefix("\u0120") for piece in pieces).lower()


@pytest.mark.parametrize("packing", sorted(PACKINGS))
def test_rows_hold_the_same_text_in_both_forms(
    corpus: Corpus, tokenizer_dir: Path, byte_level: Path, packing: str
) -> None:
    first, second = tokenizer(tokenizer_dir), tokenizer(byte_level)
    batch = stream(corpus, packing=packing, masking=MaskingConfig(rate=0.0)).batch(2)
    theirs, runs = batch.view("other"), batch.view(BOTH).runs
    covered = 0
    for row, (ours, other) in enumerate(zip(batch.input_ids, theirs.input_ids, strict=True)):
        assert (other == corpus.others[0].cls).sum() == (ours == corpus.vocabulary.cls).sum()
        spans = zip(
            *(part[row] for run in runs.values() for part in (run.first, run.sizes)), strict=True
        )
        for a, n, b, m in spans:
            assert surface(first, ours[a : a + n]) == surface(second, other[b : b + m])
            covered += n
    assert covered > 0.97 * batch.attention_mask.sum()


def test_masks_are_inherited_by_aligned_spans(corpus: Corpus) -> None:
    batch = stream(
        corpus, masking=MaskingConfig(rate=0.3, mask_fraction=0.6, random_fraction=0.2)
    ).batch(1)
    theirs, both = batch.view("other"), batch.view(BOTH)
    ours, other = batch.labels() >= 0, theirs.labels() >= 0
    mask = corpus.vocabulary.mask, corpus.others[0].mask
    compared = 0
    for row in range(12):
        runs = [both.runs[name] for name in (DEFAULT_VIEW, "other")]
        for a, n, b, m in zip(
            *(part[row] for run in runs for part in (run.first, run.sizes)), strict=True
        ):
            if not n:  # no span
                continue
            inside = slice(a, a + n), slice(b, b + m)
            assert bool(ours[row, inside[0]].any()) == bool(other[row, inside[1]].any())
            assert other[row, inside[1]].all() == other[row, inside[1]].any()
            if ours[row, inside[0]].any():
                at = a + int(ours[row, inside[0]].argmax())
                shown = batch.input_ids[row, at] == mask[0]
                assert (theirs.input_ids[row, inside[1]] == mask[1]).all() == shown
                compared += n == m == 1
        for slot, label in enumerate(both.targets[MASKED].labels[row]):
            if label >= 0:
                at = both.targets[MASKED].positions[row, slot]
                for view, run in zip((batch, theirs), runs, strict=True):
                    target = view.targets[MASKED]
                    column = target.positions[row, run.slots[row, slot]]
                    assert (column, 1) == (run.first[row, at], run.sizes[row, at])
    assert compared == (both.targets[MASKED].labels >= 0).sum() > 5


def columns(batch: Batch) -> dict[str, np.ndarray]:
    parts = {name: getattr(batch, name) for name in ("input_ids", "attention_mask")}
    return {**parts, "labels": batch.labels()}


@pytest.mark.parametrize("packing", ["contiguous", "best_fit", "segment_pair"])
def test_rows_do_not_depend_on_the_number_of_ranks(corpus: Corpus, packing: str) -> None:
    whole = stream(corpus, packing=packing).batch(3)
    plain = BatchStream(
        corpus.split("train"), DataConfig(path="unused", sequence_length=64, packing=packing), 1, 12
    ).batch(3)
    np.testing.assert_array_equal(whole.input_ids, plain.input_ids)
    for rank in range(3):
        part = stream(corpus, rank, 3, packing=packing).batch(3)
        rows = whole.rows(rank * 4, rank * 4 + 4)
        for name in ("other", BOTH):
            ours, theirs = columns(part.view(name)), columns(rows.view(name))
            for key, array in ours.items():
                given = theirs[key][..., : array.shape[-1]] if array.ndim == 2 else theirs[key]
                np.testing.assert_array_equal(array, given, err_msg=f"{name} {key}")


def test_rows_fit_the_model_that_reads_them(corpus: Corpus) -> None:
    long, short = (stream(corpus, longest=longest).batch(0) for longest in (None, 50))
    ours, theirs = (batch.view("other").input_ids for batch in (long, short))
    assert ours.shape[1] > theirs.shape[1]
    assert theirs.shape[1] in range(45, 51)
    ends = short.view("other").attention_mask.sum(1) - 1
    assert (theirs[np.arange(12), ends] == corpus.others[0].sep).all()
