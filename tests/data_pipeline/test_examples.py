"""Labelled examples: in one order on any number of ranks, each once in an epoch."""

from __future__ import annotations

import numpy as np
import pytest

from data_pipeline import BatchSizes, Corpus, DataError, ExampleStream, Target, encode_texts
from data_pipeline.tokenization.tokenizer import load

TEXTS = ["a small town", "the river", "one two three four five six seven eight", "it rained"] * 5
LABELS = np.arange(20) % 3


@pytest.fixture
def examples(corpus: Corpus):
    return encode_texts(TEXTS, {"moods": Target(LABELS)}, corpus.tokenizer_dir, length=8)


def test_texts_are_closed_and_cut_off(corpus: Corpus, examples) -> None:
    tokenizer, vocabulary = load(corpus.tokenizer_dir)
    lengths = examples.attention_mask.sum(axis=1)
    for row, text in enumerate(TEXTS):
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:6]
        expected = [vocabulary.cls, *ids, vocabulary.sep]
        assert examples.input_ids[row, : lengths[row]].tolist() == expected
        assert (examples.input_ids[row, lengths[row] :] == vocabulary.pad).all()


def test_every_example_comes_once_an_epoch_and_ranks_share_a_step(examples) -> None:
    sizes = BatchSizes.of({0: 6, 5: 4})
    whole = ExampleStream(examples, seed=3, sizes=sizes)
    batches = [whole.batch(step) for step in range(20)]
    seen = np.concatenate([[*zip(b.epochs, b.sample_ids, strict=True)] for b in batches])
    for epoch in range(3):
        assert sorted(seen[seen[:, 0] == epoch, 1]) == list(range(20))
    orders = [seen[seen[:, 0] == epoch, 1].tolist() for epoch in range(2)]
    assert orders[0] != orders[1]
    for step in (0, 4, 5, 7):
        parts = [ExampleStream(examples, 3, sizes, rank, 2).batch(step) for rank in range(2)]
        joined = np.concatenate([part.targets["moods"].labels for part in parts])
        assert joined.tolist() == batches[step].targets["moods"].labels.tolist()
        ids = batches[step].sample_ids
        assert joined.tolist() == LABELS[ids].tolist()


def test_a_batch_has_to_divide_by_the_ranks(examples) -> None:
    with pytest.raises(DataError, match=r"batch\.size: must divide by 3 ranks"):
        ExampleStream(examples, 0, BatchSizes.constant(4), 0, 3)
