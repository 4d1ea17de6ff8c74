"""Packings against plain loops over the text of the corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from configs.errors import ConfigError
from configs.typed import build
from data_pipeline import (
    PAIRS,
    BatchStream,
    Corpus,
    DataConfig,
    MaskingConfig,
    PhaseConfig,
    SourceConfig,
    padding_fraction,
)
from data_pipeline.building.merging import documents
from data_pipeline.packing.kinds import PACKINGS
from data_pipeline.packing.sequences import PackingRules, count
from data_pipeline.reading.corpus import padding_fractions
from data_pipeline.shards.blocks import Block
from data_pipeline.shards.index import Index
from tests.data_pipeline.conftest import make_documents


def epoch_of(corpus: Corpus, epoch: int = 0, split: str = "train", **options):
    """All samples of an epoch in sample order: input_ids, segment_ids, pair_labels."""
    masking = MaskingConfig(rate=0.0)
    config = DataConfig(**({"path": "x", "sequence_length": 64} | options), masking=masking)
    stream = BatchStream(corpus.split(split), config, 5, 16)
    total = stream.samples_per_epoch
    steps = range(epoch * total // 16, -(-(epoch + 1) * total // 16))
    batches = [stream.batch(step) for step in steps]
    rows = [batch.rows(row, row + 1) for batch in batches for row in range(16)]
    rows = [row for row in rows if row.epochs[0] == epoch]
    assert len(rows) == total
    rows.sort(key=lambda batch: int(batch.sample_ids[0]))
    labels = [int(row.targets[PAIRS].labels[0]) if PAIRS in row.targets else None for row in rows]
    return [row.input_ids[0] for row in rows], [row.segment_ids[0] for row in rows], labels


def segments(corpus: Corpus, ids: np.ndarray, segment_ids: np.ndarray) -> list[list[int]]:
    """The text of each segment, without special tokens."""
    special = corpus.vocabulary.is_special
    return [ids[(segment_ids == number) & ~special[ids]].tolist() for number in (0, 1)]


def test_contiguous_wastes_nothing_but_the_end_of_a_block(corpus: Corpus) -> None:
    ids, _, _ = epoch_of(corpus, packing="contiguous")
    pad = corpus.vocabulary.pad
    short = sum((row == pad).any() for row in ids)
    assert short <= len(corpus.split("train").index.blocks)
    text = np.concatenate([row[row != pad][1:-1] for row in ids])
    special = corpus.vocabulary.is_special
    tokens = np.concatenate([one.tokens for one in documents(corpus.split("train"))])
    np.testing.assert_array_equal(text[~special[text]], tokens)


@pytest.mark.parametrize("packing", ["segment_pair", "sop"])
@pytest.mark.parametrize("short", [0.0, 0.3])
def test_pairs_hold_all_text_and_mean_what_their_labels_say(
    corpus: Corpus, packing: str, short: float
) -> None:
    options = {"packing": packing, "short_sequence_probability": short, "sequence_length": 48}
    texts = [one.tokens.tolist() for one in documents(corpus.split("train"))]
    text = "|".join(" ".join(map(str, one)) + " " for one in texts)
    for epoch in (0, 1):
        ids, segment_ids, labels = epoch_of(corpus, epoch, **options)
        assert 0.4 < np.mean(labels) < 0.6
        for row, kinds, label in list(zip(ids, segment_ids, labels, strict=True))[:150]:
            first, second = segments(corpus, row, kinds)
            assert first
            assert second
            order = (second, first) if packing == "sop" and label else (first, second)
            follows = " ".join(map(str, order[0] + order[1])) + " "
            assert (follows in text) == (packing == "sop" or not label)
            assert (row == corpus.vocabulary.sep).sum() == 2
        if packing == "sop":
            seen = Counter(token for row in ids for token in row.tolist())
            expected = Counter(token for text in texts for token in text)
            assert all(seen[token] == n for token, n in expected.items())


def test_negatives_come_from_another_document_each_segment_once(corpus: Corpus) -> None:
    for packing in ("segment_pair", "sentence_pair"):
        ids, segment_ids, labels = epoch_of(corpus, packing=packing, sequence_length=200)
        texts = [
            " ".join(map(str, one.tokens.tolist())) for one in documents(corpus.split("train"))
        ]
        for row, kinds, label in list(zip(ids, segment_ids, labels, strict=True))[:100]:
            one, other = (
                {n for n, text in enumerate(texts) if " ".join(map(str, part)) in text}
                for part in segments(corpus, row, kinds)
            )
            if label and len(one) == len(other) == 1:
                assert one != other


def test_pairs_are_drawn_anew_each_epoch(corpus: Corpus) -> None:
    for packing in ("segment_pair", "sop"):
        first, second = (epoch_of(corpus, epoch, packing=packing)[2] for epoch in (0, 1))
        assert len(first) == len(second)
        assert first != second


def test_sentence_pairs_are_two_sentences(corpus: Corpus) -> None:
    ids, segment_ids, labels = epoch_of(corpus, packing="sentence_pair", sequence_length=200)
    sentences = {
        tuple(one.tolist())
        for document in documents(corpus.split("train"))
        for one in np.split(document.tokens, np.cumsum(document.sentences, dtype=int)[:-1])
    }
    prefixes = {sentence[:end] for sentence in sentences for end in range(1, len(sentence) + 1)}
    pairs = [segments(corpus, *row) for row in zip(ids, segment_ids, strict=True)]
    # The rest: a third sentence, or a lone one cut in two.
    assert np.mean([tuple(first) in sentences for first, _ in pairs]) > 0.8
    assert np.mean([tuple(second) in prefixes for _, second in pairs]) > 0.8
    assert 0.4 < np.mean(labels) < 0.6


def test_a_document_alone_in_its_blocks_has_no_negatives(
    make_corpus: Callable[..., Corpus],
) -> None:
    one = make_corpus(["\n".join(make_documents(30))], val_fraction=0.0)
    _, _, labels = epoch_of(one, packing="segment_pair")
    assert len(labels) > 10
    assert set(labels) == {0}
    _, _, labels = epoch_of(one, packing="sop")
    assert set(labels) == {0, 1}


def test_a_dominating_document_borrows_its_negatives(make_corpus: Callable[..., Corpus]) -> None:
    big = "\n".join(make_documents(30))
    corpus = make_corpus([big, *make_documents(3, 5)], val_fraction=0.0, block_bytes=1 << 20)
    _, _, labels = epoch_of(corpus, packing="segment_pair")
    assert 0.3 < np.mean(labels) < 0.7


@pytest.mark.parametrize("packing", PACKINGS)
def test_counts_need_no_tokens(corpus: Corpus, packing: str) -> None:
    """The index alone determines how many sequences a block makes, whatever its ids are."""
    split, rules = corpus.split("train"), PackingRules(packing, 40, 0.0)
    for number, boundaries in enumerate(split.index.boundaries()):
        assert count(boundaries, rules) == count(split.read_block(number), rules)


def test_cached_counts_keep_the_names_that_corpora_have() -> None:
    """Else corpora that are there would be counted again."""
    for packing in ("full_sentences", "contiguous", "doc_sentences"):
        assert PackingRules(packing, 128).name == f"{packing}-128"
    for packing in ("segment_pair", "sentence_pair", "sop"):
        assert PackingRules(packing, 128).name == f"{packing}-128-units2"
    assert PackingRules("sop", 128, 0.1).name == "sop-128-short0.1-units2"


@pytest.mark.parametrize("packing", PACKINGS)
def test_counts_of_an_earlier_version_of_a_rule_are_not_read(
    make_corpus: Callable[..., Corpus], packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    split, rules = make_corpus(make_documents(30)).split("train"), PackingRules(packing, 64)
    before = split.sequence_counts(rules).per_block.tolist()
    monkeypatch.setattr(PACKINGS[packing], "version", PACKINGS[packing].version + 1)
    monkeypatch.setattr(
        "data_pipeline.packing.sequences.count", lambda block, rules: 1 + count(block, rules)
    )
    assert split.sequence_counts(rules).per_block.tolist() == [1 + one for one in before]


def test_padding_fraction() -> None:
    """With English-like sentence lengths: at most 5% for full_sentences at 512, 0.1% contiguous."""
    draw = np.random.default_rng(0)
    sentences = np.clip(draw.gamma(3.0, 8.5, 20_000), 2, 200).astype(np.uint16)
    documents_ = np.full(1000, 20, np.uint32)
    block = Block(np.zeros(int(sentences.sum()), np.uint16), sentences, documents_)
    for packing, limit in (("full_sentences", 0.05), ("contiguous", 0.001)):
        rules = PackingRules(packing, 512)
        lengths = rules.packing.spans(block, rules).lengths + 2
        assert 1 - lengths.sum() / (512 * len(lengths)) < limit


@pytest.mark.parametrize("packing", PACKINGS)
def test_short_sequences_make_more_of_them_or_are_refused(corpus: Corpus, packing: str) -> None:
    values = {"path": "x", "packing": packing, "short_sequence_probability": 0.5}
    if PACKINGS[packing].draws_lengths:
        build(values, DataConfig)
        block = Block(np.zeros(3000, np.uint16), np.full(300, 10), np.full(10, 30))
        assert count(block, PackingRules(packing, 64, 0.5)) > count(
            block, PackingRules(packing, 64)
        )
    else:
        with pytest.raises(ConfigError, match=f"probability: does not go with packing: {packing}"):
            build(values, DataConfig)


@pytest.mark.parametrize("short", [0.0, 0.3])
@pytest.mark.parametrize("packing", PACKINGS)
def test_padding_share_is_that_of_an_epoch(corpus: Corpus, packing: str, short: float) -> None:
    if short and not PACKINGS[packing].draws_lengths:
        return
    rules = PackingRules(packing, 64, short)
    ids, _, _ = epoch_of(corpus, packing=packing, short_sequence_probability=short)
    expected = np.mean(np.array(ids) == corpus.vocabulary.pad)
    # Exchanged segments are cut alike, in each epoch others; in blocks as small as these by much.
    tolerance = 0.03 if rules.is_pair else 1e-12
    assert padding_fraction(corpus.split("train"), rules) == pytest.approx(expected, abs=tolerance)


def test_padding_share_reads_no_shard_and_not_every_block(
    make_corpus: Callable[..., Corpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, rules = make_corpus(make_documents(200)), PackingRules("full_sentences", 64)
    split = corpus.split("train")
    for shard in split.folder.glob("*.tar"):
        shard.unlink()
    of_all = padding_fraction(split, rules)
    again = Corpus.open(str(split.folder.parent)).split("train")
    monkeypatch.setattr(Index, "boundaries", None)  # nor are blocks packed a second time
    assert padding_fraction(again, rules) == of_all
    monkeypatch.undo()
    monkeypatch.setattr("data_pipeline.reading.corpus._padding_fractions", {})
    monkeypatch.setattr("data_pipeline.reading.corpus.SAMPLED_BLOCKS", len(split.index.blocks) // 3)
    of_some = padding_fraction(split, rules)
    assert of_some != of_all
    assert of_some == pytest.approx(of_all, abs=0.03)


def test_padding_of_phases_and_mixtures(corpus: Corpus, make_corpus: Callable[..., Corpus]) -> None:
    splits = {
        "a": corpus.split("train"),
        "b": make_corpus(["A word."], val_fraction=0.0).split("train"),
    }
    mixture = {"a": SourceConfig("x", 3.0), "b": SourceConfig("y", 1.0)}
    config = DataConfig(
        mixture=mixture, sequence_length=32, phases=[PhaseConfig(5, 64, "doc_sentences")]
    )
    rules = [PackingRules("full_sentences", 32), PackingRules("doc_sentences", 64)]
    expected = [
        (3 * padding_fraction(splits["a"], one) + padding_fraction(splits["b"], one)) / 4
        for one in rules
    ]
    assert padding_fractions(splits, config) == pytest.approx(expected)
    alone = padding_fractions(splits["a"], DataConfig(path="x", sequence_length=32))
    assert alone == [padding_fraction(splits["a"], rules[0])]


def test_phases_change_length_and_packing(corpus: Corpus) -> None:
    config = DataConfig(
        path="x",
        sequence_length=32,
        phases=[
            PhaseConfig(5, sequence_length=128),
            PhaseConfig(9, packing="segment_pair"),
        ],
    )
    stream = BatchStream(corpus.split("train"), config, 1, 4)
    shapes = {step: stream.batch(step).input_ids.shape[1] for step in (8, 9, 0, 4, 5)}
    assert shapes == {0: 32, 4: 32, 5: 128, 8: 128, 9: 128}
    assert PAIRS not in stream.batch(8).targets
    assert PAIRS in stream.batch(9).targets
    with pytest.raises(ValueError, match=r"^phases: "):
        DataConfig(phases=[PhaseConfig(5, 64), PhaseConfig(5, 128)])
