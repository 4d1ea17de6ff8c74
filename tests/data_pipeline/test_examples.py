"""Labelled examples: encoded once as a corpus, in the same order on any number of ranks."""

from __future__ import annotations

import tracemalloc
from functools import partial
from pathlib import Path
from tracemalloc import Filter

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from data_pipeline import (
    BatchSizes,
    Corpus,
    DataError,
    EncodedExample,
    ExampleSplit,
    ExampleStream,
    TextEncoder,
    all_batches,
)
from data_pipeline.building.checking import check
from data_pipeline.examples import reading, storing
from data_pipeline.examples.storing import store_examples
from data_pipeline.tokenization.tokenizer import load
from data_pipeline.tokenization.training import train

LENGTH = 16
WORDS = [
    "a",
    "small",
    "town",
    "lies",
    "by",
    "the",
    "river",
    "and",
    "it",
    "rained",
    "all",
    "day",
    "in",
    "one",
    "of",
    "them",
]
TEXTS = [" ".join(WORDS[n % 5 : n % 5 + 1 + n % 9]) for n in range(203)]


def byte_level(add_prefix_space: bool, folder: Path) -> Path:
    train([str(folder / "text")], "bpe", 300, str(folder / "out"))
    return _with_splitter(pre_tokenizers.ByteLevel(add_prefix_space), folder / "out")


def unigram(scheme: str, folder: Path) -> Path:
    train([str(folder / "text")], "unigram", 30, str(folder / "out"))
    return _with_splitter(pre_tokenizers.Metaspace(prepend_scheme=scheme), folder / "out")


def wordpiece(_: str, folder: Path) -> Path:
    train([str(folder / "text")], "wordpiece", 80, str(folder / "out"))
    return folder / "out"


def _with_splitter(splitter: pre_tokenizers.PreTokenizer, folder: Path) -> Path:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer, tokenizer.normalizer = splitter, None
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("make", "scheme", "behind_space"),
    [
        (byte_level, True, False),
        (byte_level, False, True),
        (unigram, "always", False),
        (unigram, "first", False),
        (unigram, "never", True),
        (wordpiece, "", False),
    ],
)
def test_words_of_a_sentence_have_the_ids_of_running_text(
    make, scheme, behind_space, tmp_path
) -> None:
    """As `transformers` encodes words, and where it adds no space, as words behind a space."""
    (tmp_path / "text").write_text("\n\n".join(TEXTS))
    folder = make(scheme, tmp_path)
    theirs, words = AutoTokenizer.from_pretrained(folder), ["town", "by", "the", "river", "."]
    encoder = TextEncoder(folder, LENGTH)
    given = [" " + word if behind_space else word for word in words]
    right = theirs(given, is_split_into_words=True, add_special_tokens=False)["input_ids"]
    ids = [number for word in words for number in encoder.word(word)]
    assert ids == right
    assert ids == encoder.encode("by " + " ".join(words), "here").ids[-len(ids) :]


@pytest.mark.parametrize("make", [unigram, wordpiece])
def test_a_word_without_a_token_is_unknown(make, tmp_path) -> None:
    """A unigram tokenizer made it a mask, as if it were to be predicted."""
    (tmp_path / "text").write_text("\n\n".join(TEXTS))
    encoder = TextEncoder(make("always", tmp_path), LENGTH)
    encoder.tokenizer.normalizer = normalizers.Replace("\u200b", "")
    encoder.tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert encoder.word("\u200b") == [encoder.tokenizer.token_to_id("[UNK]")]


def single(encoder: TextEncoder, texts: list[str]):
    for number, text in enumerate(texts):
        tokens = encoder.sequence([text], f"line {number}")
        tags = np.full(len(tokens[0]), -100)
        tags[0] = number
        yield EncodedExample([tokens], {"mood": number % 3, "score": number / 2, "tags": tags})


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory) -> Path:
    tokenizer = corpus.tokenizer_dir
    encoder = TextEncoder(tokenizer, LENGTH)
    folder = tmp_path_factory.mktemp("examples") / "moods"
    parts = {"train": single(encoder, TEXTS), "val": single(encoder, TEXTS[:21])}
    store_examples(folder, encoder, tokenizer, {"made": "here"}, parts)
    return folder


@pytest.fixture
def split(folder) -> ExampleSplit:
    return ExampleSplit(Corpus.open(str(folder)), "train")


def test_an_example_comes_back_with_its_targets(folder, split) -> None:
    assert check(str(folder)) == []
    tokenizer, vocabulary = load(folder / "tokenizer")
    numbers = np.array([7, 0, 202, 12])
    batch = split.batch(numbers, np.zeros(4, np.int64))
    lengths = batch.attention_mask.sum(axis=1)
    assert batch.input_ids.shape == (4, lengths.max())
    for row, number in enumerate(numbers):
        ids = tokenizer.encode(TEXTS[number], add_special_tokens=False).ids[: LENGTH - 2]
        expected = [vocabulary.cls, *ids, vocabulary.sep]
        assert batch.input_ids[row, : lengths[row]].tolist() == expected
        assert (batch.input_ids[row, lengths[row] :] == vocabulary.pad).all()
    assert batch.targets["mood"].labels.tolist() == [n % 3 for n in numbers]
    assert batch.targets["score"].labels.tolist() == [n / 2 for n in numbers]
    assert batch.targets["tags"].labels[:, 0].tolist() == numbers.tolist()
    assert batch.targets["tags"].positions.tolist() == [[1]] * 4


def test_every_example_comes_once_an_epoch_and_ranks_share_a_step(split, monkeypatch) -> None:
    sizes = BatchSizes.of({0: 6, 5: 4})
    whole = ExampleStream(split, 3, sizes)
    batches = [whole.batch(step) for step in range(160)]
    seen = np.concatenate([[*zip(b.epochs, b.sample_ids, strict=True)] for b in batches])
    orders = [seen[seen[:, 0] == epoch, 1].tolist() for epoch in range(3)]
    assert all(sorted(one) == list(range(203)) for one in orders)
    assert orders[0] != orders[1]
    for step in (0, 4, 5, 60):
        parts = [ExampleStream(split, 3, sizes, rank, 2).batch(step) for rank in range(2)]
        joined = np.concatenate([part.sample_ids for part in parts])
        assert joined.tolist() == batches[step].sample_ids.tolist()


def test_a_batch_has_examples_of_about_one_length(split) -> None:
    stream = ExampleStream(split, 3, BatchSizes.constant(8))
    batches = [stream.batch(step) for step in range(25)]
    padding = 1 - np.mean([batch.attention_mask.mean() for batch in batches])
    assert padding < 0.05  # shuffled, about a third
    first = [int(batch.attention_mask.sum(axis=1).max()) for batch in batches]
    assert first != sorted(first)


def test_pools_of_blocks_are_shuffled_one_after_the_other(split, monkeypatch) -> None:
    monkeypatch.setattr(reading, "POOL_BLOCKS", 1)
    table = split.table
    bounds = np.array([0, 50, 120, 203])
    monkeypatch.setattr(table, "first_example", bounds)
    found = reading.ExampleOrder(table, 1, BatchSizes.constant(8)).examples(2, np.arange(203))
    assert sorted(found) == list(range(203))
    pool_of = np.searchsorted(bounds, found, side="right")
    assert np.count_nonzero(np.diff(pool_of)) == 2


def test_scoring_reads_every_example_once(split) -> None:
    seen = [number for batch in all_batches(split, 16) for number in batch.sample_ids]
    assert sorted(seen) == list(range(203))


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_rank_that_scores_reads_its_own_examples_only(split, ranks, monkeypatch) -> None:
    reads, batch = [], split.batch
    monkeypatch.setattr(
        split, "batch", lambda numbers, epochs: reads.append(len(numbers)) or batch(numbers, epochs)
    )
    shares = [[*all_batches(split, 16, rank, ranks)] for rank in range(ranks)]
    assert sum(reads) < 203 + ranks  # the last rows of some ranks repeat others
    assert len({tuple(len(part.sample_ids) for part in share) for share in shares}) == 1
    scored = [
        part.sample_ids[part.targets["mood"].is_labelled] for share in shares for part in share
    ]
    assert sorted(np.concatenate(scored)) == list(range(203))


def test_labels_take_the_memory_of_their_files_while_examples_are_written(
    corpus, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(storing, "SplitWriter", partial(storing.SplitWriter, block_bytes=2000))
    encoder = TextEncoder(corpus.tokenizer_dir, LENGTH)
    tokens, count, grown = encoder.array(range(5, 15)), 2000, 0

    def examples():
        nonlocal grown
        for number in range(count):
            targets = {"score": number / 3, "tags": np.arange(10), "right": (1, number)}
            yield EncodedExample([[tokens]], targets, columns={"price": number / 7})
        here = [Filter(True, storing.__file__), Filter(True, __file__)]
        kept = tracemalloc.take_snapshot().filter_traces(here)
        grown = sum(trace.size for trace in kept.traces)

    tracemalloc.start()
    try:
        store_examples(tmp_path / "e", encoder, corpus.tokenizer_dir, {}, {"train": examples()})
    finally:
        tracemalloc.stop()
    assert grown < 1.5 * count * (4 + 40 + 8 + 8 + 8)  # of each example's numbers in the files
    split = ExampleSplit(Corpus.open(str(tmp_path / "e")), "train")
    batch = split.batch(np.array([7, 3]), np.zeros(2, np.int64))
    assert batch.targets["score"].labels.tolist() == [np.float32(7 / 3), 1.0]
    assert batch.targets["tags"].labels.tolist() == [[*range(10)]] * 2
    assert batch.targets["right"].labels.tolist() == [[1, 7], [1, 3]]
    assert batch.numbers is not None
    assert batch.numbers.tolist() == [[1.0], [3 / 7]]


def test_an_example_of_several_sequences(corpus, tmp_path) -> None:
    tokenizer = corpus.tokenizer_dir
    encoder = TextEncoder(tokenizer, LENGTH)
    choices = [[encoder.sequence([TEXTS[n], TEXTS[m]], "x") for m in (1, 2, 3)] for n in range(5)]
    examples = [EncodedExample(one, {"choice": n % 3}) for n, one in enumerate(choices)]
    store_examples(tmp_path / "c", encoder, tokenizer, {}, {"train": examples, "val": examples})
    batch = ExampleSplit(Corpus.open(str(tmp_path / "c")), "val").batch(np.arange(5), np.zeros(5))
    assert batch.input_ids.shape[:2] == (5, 3)
    part = batch.rows(0, 1).trimmed()
    assert part.input_ids.shape[2] == part.attention_mask.sum(axis=-1).max()
    first, second = choices[0][2]
    ids = part.input_ids[0, 2, part.attention_mask[0, 2] == 1]
    assert ids[1 : 1 + len(first)].tolist() == first.tolist()
    assert part.segment_ids[0, 2].sum() == len(second) + 1


def test_texts_are_cut_from_the_longer_end(corpus) -> None:
    encoder = TextEncoder(corpus.tokenizer_dir, LENGTH)
    long, short = " ".join(WORDS), "a town"
    sizes = [len(one) for one in encoder.sequence([long, short], "a:1")]
    assert sum(sizes) == LENGTH - 3
    assert sizes[1] == len(encoder.encode(short, "x").ids)
    assert [len(one) for one in encoder.sequence([long, long], "a:2")] == [6, 7]
    encoder.sequence([long, short], "a:1")
    assert encoder.cut == {"a:1", "a:2"}, "an example counts once"


def test_bad_examples_are_named(corpus, tmp_path) -> None:
    tokenizer = corpus.tokenizer_dir
    encoder = TextEncoder(tokenizer, LENGTH)
    with pytest.raises(DataError, match="here:3: a text is empty"):
        encoder.sequence(["  "], "here:3")
    mixed = [
        EncodedExample([encoder.sequence([text], "x")] * n, {}) for n, text in ((1, "a"), (2, "b"))
    ]
    with pytest.raises(DataError, match="differ in their sequences"):
        store_examples(tmp_path / "m", encoder, tokenizer, {}, {"train": mixed})
    assert not [*tmp_path.iterdir()]
    with pytest.raises(DataError, match=r"batch\.size: must be a multiple of the 3 ranks"):
        ExampleStream(None, 0, BatchSizes.constant(4), 0, 3)


def test_splits_of_different_layouts_and_targets_of_several_values(corpus, tmp_path) -> None:
    tokenizer = corpus.tokenizer_dir
    encoder = TextEncoder(tokenizer, 32)
    text = encoder.sequence(["some words"], "here")
    train = [
        EncodedExample([text, text], {"query": n, "relevant": tuple(range(n))}) for n in range(4)
    ]
    val = [EncodedExample([text], {"query": n}) for n in range(3)]
    store_examples(tmp_path / "c", encoder, tokenizer, {}, {"train": train, "val": val})
    corpus = Corpus.open(str(tmp_path / "c"))
    numbers = np.array([3, 0, 2])
    batch = ExampleSplit(corpus, "train").batch(numbers, np.zeros(3, np.int64))
    assert batch.input_ids.shape[:2] == (3, 2)
    relevant = batch.targets["relevant"]
    assert relevant.labels.tolist() == [[0, 1, 2], [-100] * 3, [0, 1, -100]]
    without = batch.without_labels(np.array([True, False, False]))
    cut = without.take(np.array([0, 2])).targets["relevant"]
    assert cut.labels.tolist() == [[-100] * 3, [0, 1, -100]]
    scored = ExampleSplit(corpus, "val").batch(np.arange(3), np.zeros(3, np.int64))
    assert scored.input_ids.ndim == 2
    assert [*scored.targets] == ["query"]
