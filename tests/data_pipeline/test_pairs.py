"""Pairs: only the text of a pair tells its label, and no text is lost."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data_pipeline import BuildOptions, Corpus, build
from data_pipeline.hashing import PairDraw
from data_pipeline.packing.kinds import PACKINGS, pairs
from data_pipeline.packing.kinds.pairs import Pool, pair_spans
from data_pipeline.packing.sequences import PackingRules
from data_pipeline.shards.blocks import Block
from data_pipeline.text.sentences import sentence_ends
from data_pipeline.text.system_prose import gather, python_sources
from tests.data_pipeline.conftest import make_documents
from tests.data_pipeline.pair_cues import accuracy, lengths, of_epoch, pools, repeat
from tests.data_pipeline.test_packing import epoch_of
from tests.real_data import real_data

NEXT = ("segment_pair", "sentence_pair")
Documents = Sequence[Sequence[int]]  # tokens of each sentence


@pytest.fixture(scope="module")
def python_text() -> Documents:
    """The docstrings of Python's library, with words and punctuation as tokens."""
    return [
        [
            max(len(re.findall(r"\w+|[^\w\s]", document[start:end])), 1)
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
        for document in gather(python_sources(Path(sysconfig.get_paths()["stdlib"])))
        if (ends := sentence_ends(document))
    ]


def test_every_packing_of_pairs_is_tested_here() -> None:
    assert {one for one in PACKINGS if PACKINGS[one].pair_labels} == {*NEXT, "sop"}


def block_of(documents: Documents) -> Block:
    sentences = np.array([size for document in documents for size in document], np.uint16)
    sizes = np.array([len(document) for document in documents], np.uint32)
    return Block(np.zeros(int(sentences.sum()), np.uint16), sentences, sizes)


def pool_of(*blocks: Documents) -> Pool:
    numbers = np.cumsum([0, *(len(documents) for documents in blocks[:-1])])
    return Pool([block_of(documents) for documents in blocks], numbers.tolist())


def units_of(pool: Pool, rules: PackingRules) -> list[tuple[int, int]]:
    """(start, end) of each unit of a pool's only block."""
    spans = rules.packing.spans(pool.blocks[0], rules)
    return list(zip(spans.starts, spans.starts + spans.lengths, strict=True))


def of_half(text: Documents, second: bool) -> Pool:
    """Every second document, in two blocks."""
    half = text[second::2]
    return pool_of(half[: len(half) // 2], half[len(half) // 2 :])


@pytest.mark.slow
@pytest.mark.parametrize("length", [128, 512])
@pytest.mark.parametrize("packing", NEXT)
def test_lengths_do_not_tell_the_label(python_text: Documents, packing: str, length: int) -> None:
    rules = PackingRules(packing, length, short_probability=0.1)

    def pairs_of(second: bool) -> tuple[np.ndarray, np.ndarray]:
        pool = of_half(python_text, second)
        return repeat(lambda key: lengths([pair_spans(pool, rules, key)]), 20_000)

    fit, judged = pairs_of(False), pairs_of(True)
    assert abs(accuracy(fit, judged) - 0.5) < 0.02
    # A shortcut would be found: negatives that are one twentieth shorter.
    fault = [(cues * (1 - 0.05 * labels[:, None]), labels) for cues, labels in (fit, judged)]
    assert accuracy(*fault) > 0.53


@pytest.mark.slow
@pytest.mark.parametrize("text", ["enwiki_10mb", "books_valid"])
def test_lengths_do_not_tell_the_label_of_real_text(tmp_path: Path, text: str) -> None:
    """On at least 20,000 pairs of unseen documents."""
    path = real_data("text", f"{text}.txt.xz")
    tokenizer = str(real_data("tokenizers", "bert-base-uncased"))
    build(BuildOptions([str(path)], tokenizer, val_fraction=0.5), str(tmp_path / "corpus"))
    corpus = Corpus.open(str(tmp_path / "corpus"))
    splits = corpus.split("train"), corpus.split("val")
    for packing in NEXT:
        for length in (128, 512):
            rules = PackingRules(packing, length)
            fit, judged = (
                repeat(lambda n, one=one, rules=rules: of_epoch(one, rules, n), 20_000)
                for one in splits
            )
            assert abs(accuracy(fit, judged) - 0.5) < 0.02, (packing, length)


@pytest.mark.parametrize("packing", NEXT)
def test_what_is_drawn_for_labels_changes_no_length(
    python_text: Documents, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, rules = pool_of(python_text[:100], python_text[100:200]), PackingRules(packing, 128)
    one = pair_spans(pool, rules, 1)
    others = {tag.name: int(tag) for tag in PairDraw}
    monkeypatch.setattr(pairs, "PairDraw", SimpleNamespace(**{**others, "LABEL": 99}))
    other = pair_spans(pool, rules, 1)
    assert (one.labels != other.labels).mean() > 0.3
    for name in ("first_starts", "first_lengths", "second_lengths"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("packing", [*NEXT, "sop"])
def test_no_text_comes_twice_and_little_is_cut(python_text: Documents, packing: str) -> None:
    pool, rules = pool_of(python_text[:150], python_text[150:]), PackingRules(packing, 128)
    found = pair_spans(pool, rules, 3)
    seen = np.zeros(sum(len(block.tokens) + len(block.documents) for block in pool.blocks), int)
    for starts, sizes in (
        (found.first_starts, found.first_lengths),
        (found.second_starts, found.second_lengths),
    ):
        assert sizes.min() > 0
        for start, size in zip(starts, sizes, strict=True):
            seen[start : start + size] += 1
    assert (found.first_lengths + found.second_lengths).max() <= rules.capacity
    # One unit may borrow its second segment: the last of an odd number.
    assert (seen > 1).sum() <= rules.capacity
    tokens = sum(len(block.tokens) for block in pool.blocks)
    assert (seen > 0).sum() > (0.94 if packing == "sentence_pair" else 0.98) * tokens


def test_negatives_come_from_another_document_mostly_of_another_block() -> None:
    draw = np.random.default_rng(0)
    blocks = [[draw.integers(5, 40, 20).tolist() for _ in range(60)] for _ in range(2)]
    pool, rules = pool_of(*blocks), PackingRules("segment_pair", 128)
    found = pair_spans(pool, rules, 5)
    ends = np.cumsum([sum(document) + 1 for block in blocks for document in block])
    first, second = (
        np.searchsorted(ends, starts, side="right")
        for starts in (found.first_starts, found.second_starts)
    )
    np.testing.assert_array_equal(first != second, found.labels == 1)
    assert 0.45 < found.labels.mean() < 0.55
    negative = found.labels == 1
    assert ((first < 60) != (second < 60))[negative].mean() > 0.7


def test_a_document_that_fills_its_block_finds_negatives_in_the_other() -> None:
    draw = np.random.default_rng(0)
    long = [draw.integers(5, 40, 1000).tolist() for _ in range(2)]
    rules = PackingRules("segment_pair", 128)
    found = pair_spans(pool_of(long[:1], long[1:]), rules, 0)
    assert 0.4 < found.labels.mean() < 0.6
    both = Pool([block_of(long[:1]), block_of(long[1:])], [0, 0])  # one document goes on
    assert set(pair_spans(both, rules, 0).labels) == {0}


def test_a_unit_has_a_boundary_wherever_its_document_has_one(python_text: Documents) -> None:
    for text, packing in ((python_text, "segment_pair"), (python_text, "sop")):
        rules, pool = PackingRules(packing, 128), pool_of(text)
        begins = np.cumsum([size for document in text for size in document])
        begins += np.repeat(np.arange(len(text)), [len(document) for document in text])
        inside = [
            np.searchsorted(begins, end, side="left") > np.searchsorted(begins, start, side="right")
            for start, end in units_of(pool, rules)
        ]
        assert np.mean(inside) > 0.96


def test_two_long_sentences_share_a_unit_and_a_last_one_is_not_left_alone() -> None:
    rules = PackingRules("sop", 63)  # of 60 tokens of text
    # 35 is pieces of 18 and 17 tokens, 45 of 23 and 22.
    assert units_of(pool_of([[35, 45, 20]]), rules) == [(0, 58), (58, 100)]
    assert units_of(pool_of([[35, 45]]), rules) == [(0, 58), (58, 80)]
    assert units_of(pool_of([[20, 20, 20, 20]]), rules) == [(0, 40), (40, 80)]
    assert units_of(pool_of([[30, 30, 20]]), rules) == [(0, 60), (60, 80)]
    assert units_of(pool_of([[7]]), rules) == [(0, 7)]


def test_a_pool_is_what_is_read_one_after_the_other(make_corpus: Callable[..., Corpus]) -> None:
    corpus = make_corpus(make_documents(300), val_fraction=0.0, block_bytes=2000)
    split = corpus.split("train")
    rules = PackingRules("segment_pair", 64)
    first = split.index.shards["first_block"]
    together = Counter[tuple[int, ...]]()
    for epoch in range(3):
        found = [blocks for blocks, _ in pools(split, rules, epoch)]
        assert sorted(block for blocks in found for block in blocks) == list(
            range(len(split.index.blocks))
        )
        assert {len(blocks) for blocks in found} <= {1, 2, 3}
        for blocks in found:
            shard = {split.index.shard_of(block) for block in blocks}
            assert len(shard) == 1
            if len(blocks) == 1:
                assert (np.diff([*first, len(split.index.blocks)]) == 1)[shard.pop()]
        together.update(map(tuple, found))
    assert len(together) > len(found)  # other pools in other epochs


def test_boundaries_of_a_block_are_those_of_all(make_corpus: Callable[..., Corpus]) -> None:
    long = "\n".join(make_documents(40))  # goes on over many blocks
    split = make_corpus([*make_documents(9), long, *make_documents(30, 2)]).split("train")
    index = split.index
    assert index.blocks["continues"].any()
    number = -1
    for block, expected in enumerate(index.boundaries()):
        (found,) = index.boundaries(block, block + 1)
        first = index.first_document(block)
        np.testing.assert_array_equal(found.sentences, expected.sentences)
        np.testing.assert_array_equal(found.documents, expected.documents)
        assert len(found.tokens) == len(expected.tokens)
        if block in index.shards["first_block"]:
            number = -1
        elif not index.blocks["continues"][block]:
            number += 1
        assert first == max(number, 0)
        number = first + len(found.documents) - 1


@pytest.mark.parametrize("packing", NEXT)
def test_a_document_of_many_blocks_is_never_its_own_stranger(
    make_corpus: Callable[..., Corpus], packing: str
) -> None:
    corpus = make_corpus(["\n".join(make_documents(60))], val_fraction=0.0)
    assert len(corpus.split("train").index.blocks) > 3
    assert set(epoch_of(corpus, packing=packing)[2]) == {0}
