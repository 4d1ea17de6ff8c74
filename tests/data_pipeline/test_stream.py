"""Batches: complete, the same for every world size, the same after any restart."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from data_pipeline import (
    MASKED,
    PAIRS,
    Batch,
    BatchStream,
    Corpus,
    DataConfig,
    DataError,
    MaskingConfig,
    Target,
    rows_for_tokens,
)
from data_pipeline.packing.kinds import PACKINGS
from tests.data_pipeline.conftest import make_documents


def config(**options) -> DataConfig:
    return DataConfig(**({"path": "unused", "sequence_length": 64} | options))


def columns(batch: Batch) -> dict[str, np.ndarray]:
    """Every array of a batch, by name."""
    found = {field.name: getattr(batch, field.name) for field in dataclasses.fields(Batch)}
    arrays = {name: one for name, one in found.items() if isinstance(one, np.ndarray)}
    for name, target in batch.targets.items():
        arrays[f"{name} labels"] = target.labels
        if target.positions is not None:
            arrays[f"{name} positions"] = target.positions
    return arrays


def assert_equal(left: Batch, right: Batch) -> None:
    ours, theirs = columns(left), columns(right)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def joined(batches: list[Batch]) -> Batch:
    """The rows of several batches as one."""
    parts = [columns(batch) for batch in batches]
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    targets = {
        name: Target(whole.pop(f"{name} labels"), whole.pop(f"{name} positions", None))
        for name in batches[0].targets
    }
    return Batch(targets=targets, **whole)


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_sample_once_an_epoch(corpus: Corpus, packing: str) -> None:
    stream = BatchStream(corpus.split("train"), config(packing=packing), 3, 7)
    total = stream.samples_per_epoch
    batches = joined([stream.batch(step) for step in range(-(-2 * total // 7))]).rows(0, 2 * total)
    assert Counter(zip(batches.epochs.tolist(), batches.sample_ids.tolist(), strict=True)) == (
        Counter((epoch, sample) for epoch in range(2) for sample in range(total))
    )


@given(st.integers(0, 2**62), st.integers(0, 10**7), st.sampled_from([*PACKINGS]))
@settings(max_examples=15)
def test_world_size_changes_nothing(corpus: Corpus, seed: int, step: int, packing: str) -> None:
    split, data = corpus.split("train"), config(packing=packing)
    whole = BatchStream(split, data, seed, 12).batch(step)
    for world_size in (2, 3, 12):
        parts = [
            BatchStream(split, data, seed, 12, rank, world_size).batch(step)
            for rank in range(world_size)
        ]
        assert_equal(joined(parts), whole)


@given(st.integers(0, 2**62), st.lists(st.integers(0, 300), min_size=1, max_size=8))
@settings(max_examples=15)
def test_any_step_can_be_had_at_any_time(corpus: Corpus, seed: int, steps: list[int]) -> None:
    used = BatchStream(corpus.split("train"), config(), seed, 8)
    for step in steps:
        fresh = BatchStream(corpus.split("train"), config(), seed, 8)
        assert_equal(used.batch(step), fresh.batch(step))


@given(st.integers(1, 60), st.integers(1, 40), st.integers(0, 2**32), st.sampled_from([16, 40]))
@settings(max_examples=10)
def test_any_corpus_gives_back_its_text(
    make_corpus: Callable[..., Corpus], documents: int, batch: int, seed: int, length: int
) -> None:
    """The sequences of an epoch, unmasked and put in order, are the text of the corpus."""
    corpus = make_corpus(make_documents(documents, seed), val_fraction=0.0)
    split = corpus.split("train")
    assume(split.index.tokens >= length - 2)  # less than a sequence is refused
    data = config(sequence_length=length, masking=MaskingConfig(rate=0.0))
    stream = BatchStream(split, data, seed, batch)
    steps = -(-stream.samples_per_epoch // batch)
    all_rows = joined([stream.batch(step) for step in range(steps)])
    epoch = all_rows.rows(0, stream.samples_per_epoch)
    ordered = epoch.input_ids[np.argsort(epoch.sample_ids)]
    blocks = [split.read_block(number).tokens for number in range(len(split.index.blocks))]
    special = corpus.vocabulary.is_special
    np.testing.assert_array_equal(ordered[~special[ordered]], np.concatenate(blocks))


def test_shape_of_a_sequence(corpus: Corpus) -> None:
    stream = BatchStream(corpus.split("train"), config(), 1, 32)
    batch, vocabulary = stream.batch(4), corpus.vocabulary
    used = batch.attention_mask.sum(1)
    ids = batch.input_ids
    assert (ids[:, 0] == vocabulary.cls).all()
    assert (ids[np.arange(32), used - 1] == vocabulary.sep).all()
    assert (ids[np.arange(32), used - 2] != vocabulary.sep).all()
    assert ((ids == vocabulary.pad) == (batch.attention_mask == 0)).all()
    masked = batch.targets[MASKED]
    assert masked.positions.shape == masked.labels.shape == (32, round(0.15 * 62))
    labels = batch.labels()
    assert ((labels != -100).sum(1) == (batch.targets[MASKED].labels != -100).sum(1)).all()
    part = batch.rows(8, 16)
    np.testing.assert_array_equal(part.labels(), labels[8:16])


@pytest.mark.parametrize(
    ("options", "batch", "world", "message"),
    [
        ({}, 6, 4, "6 rows cannot be split among 4 ranks"),
        ({"sequence_length": 32768}, 4, 1, "less than one full sequence .* larger --val-fraction"),
        ({"packing": "contiguous"}, 4096, 4096, "too few for 4096 ranks"),
    ],
)
def test_what_a_user_did_is_one_line(corpus: Corpus, options, batch, world, message) -> None:
    with pytest.raises(DataError, match=message) as caught:
        BatchStream(corpus.split("val"), config(**options), 1, batch, 0, world)
    assert "\n" not in str(caught.value)


def test_missing_and_unfinished_corpora(tmp_path) -> None:
    with pytest.raises(DataError, match="no such corpus"):
        Corpus.open(str(tmp_path / "none"))
    with pytest.raises(DataError, match="not a finished corpus"):
        Corpus.open(str(tmp_path))


def test_a_corpus_of_another_vocabulary_is_refused(corpus: Corpus) -> None:
    corpus.require_vocabulary(corpus.vocab_size, corpus.tokenizer_dir)
    other = dataclasses.replace(
        corpus, vocabulary=dataclasses.replace(corpus.vocabulary, fingerprint="0" * 64)
    )
    with pytest.raises(DataError, match="another vocabulary"):
        other.require_vocabulary(corpus.vocab_size, corpus.tokenizer_dir)
    with pytest.raises(DataError, match="vocab_size 10"):
        corpus.require_vocabulary(10)


def test_a_split_without_documents_is_refused(make_corpus: Callable[..., Corpus]) -> None:
    corpus = make_corpus(make_documents(20), val_fraction=0.0)
    with pytest.raises(DataError, match="no documents"):
        corpus.split("val")


@pytest.mark.parametrize("packing", ["full_sentences", "sop"])
def test_samples_are_those_of_the_batch(corpus: Corpus, packing: str) -> None:
    stream = BatchStream(corpus.split("train"), config(packing=packing), 3, 12, 1, 2)
    for step in (0, 7, 500, 10**6):
        epochs, sample_ids = stream.samples(step)
        batch = stream.batch(step)
        np.testing.assert_array_equal(epochs, batch.epochs)
        np.testing.assert_array_equal(sample_ids, batch.sample_ids)


@pytest.mark.parametrize("packing", ["sentence_pair", "doc_sentences", "full_sentences"])
def test_rows_for_tokens(corpus: Corpus, packing: str) -> None:
    """Batches of this many rows hold about this many tokens, without padding."""
    split, data = corpus.split("train"), config(packing=packing, sequence_length=128)
    rows = rows_for_tokens(split, data, 0, tokens=6000, multiple=8)
    assert rows % 8 == 0
    stream = BatchStream(split, data, 1, rows)
    steps = range(-(-2 * stream.samples_per_epoch // rows))
    tokens = np.mean([stream.batch(step).attention_mask.sum() for step in steps])
    mean_row = tokens / rows
    assert abs(tokens - 6000) <= 4 * mean_row + 0.03 * 6000  # the nearest multiple
    assert rows_for_tokens(split, data, 0, tokens=1, multiple=8) == 8


@pytest.mark.slow
@pytest.mark.parametrize("packing", PACKINGS)
def test_copies_come_again_after_as_many_epochs(corpus: Corpus, packing: str) -> None:
    """With two fixed copies of each sequence, epochs 0 and 2 are equal, including masks."""
    data = config(packing=packing, masking=MaskingConfig(copies=2))
    stream = BatchStream(corpus.split("train"), data, 3, 7)
    total = stream.samples_per_epoch
    rows = joined([stream.batch(step) for step in range(-(-4 * total // 7))])
    ordered = rows.take(np.lexsort((rows.sample_ids, rows.epochs)))
    epochs = [ordered.rows(n * total, (n + 1) * total) for n in range(4)]
    for one, other in ((epochs[0], epochs[2]), (epochs[1], epochs[3])):
        assert_equal(dataclasses.replace(one, epochs=other.epochs), other)
    first, second = (one.targets for one in epochs[:2])
    assert (first[MASKED].positions != second[MASKED].positions).any()
    if PAIRS in first:
        assert (first[PAIRS].labels != second[PAIRS].labels).mean() > 0.3
