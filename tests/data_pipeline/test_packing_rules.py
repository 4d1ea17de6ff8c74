"""The rule of every packing against a plain loop over the sentences of a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest

from data_pipeline import Corpus, CorpusSplit
from data_pipeline.packing.kinds import PACKINGS
from data_pipeline.packing.sequences import PackingRules, count, stream
from data_pipeline.shards.blocks import Block, joined
from tests.data_pipeline.test_packing import epoch_of

Tokens = list[int]
Documents = Sequence[Sequence[Tokens]]  # the sentences of each document of a block


def slices(tokens: Tokens, size: int) -> list[Tokens]:
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


def full_sentences(documents: Documents, capacity: int, sep: int) -> list[Tokens]:
    found: list[Tokens] = []
    current: Tokens = []
    for document in documents:
        for number, sentence in enumerate(document):
            separator = [sep] if number == 0 and current else []
            for piece in slices(sentence, capacity):
                if len(current) + len(separator) + len(piece) > capacity:
                    found.append(current)
                    current, separator = [], []
                current = current + separator + piece
                separator = []
    return [*found, current] if current else found


def doc_sentences(documents: Documents, capacity: int, sep: int) -> list[Tokens]:
    return [one for document in documents for one in full_sentences([document], capacity, sep)]


def contiguous(documents: Documents, capacity: int, sep: int) -> list[Tokens]:
    text: Tokens = []
    for document in documents:
        text += [sep] if text else []
        text += [token for sentence in document for token in sentence]
    return slices(text, capacity)


def two_sentences(documents: Documents, capacity: int, sep: int) -> list[Tokens]:
    found = []
    for document in documents:
        rest = [piece for sentence in document for piece in slices(sentence, capacity)]
        while rest:
            taken = 3 if len(rest) == 3 else 2
            found.append([token for piece in rest[:taken] for token in piece])
            rest = rest[taken:]
    return [unit for unit in found if len(unit) > 1]


def with_a_boundary(documents: Documents, capacity: int, sep: int) -> list[Tokens]:
    """Units of two or more parts of sentences; the last one of a document may borrow a part."""
    found = []
    for document in documents:
        rest: list[tuple[bool, Tokens]] = []  # whether a sentence begins, and the part
        for sentence in document:
            number = -(-len(sentence) // (capacity // 2))
            parts = slices(sentence, -(-len(sentence) // number))
            rest += [(nth == 0, part) for nth, part in enumerate(parts)]
        runs = []
        while rest:
            taken = 2
            while taken < len(rest) and sum(len(one) for _, one in rest[: taken + 1]) <= capacity:
                taken += 1
            runs.append(rest[:taken])
            rest = rest[taken:]
        *_, before, last = [[], *runs]
        if len(last) == 1 and last[0][0] and any(begins for begins, _ in before[1:-1]):
            last.insert(0, before.pop())
        found += [[token for _, part in run for token in part] for run in runs]
    return [unit for unit in found if len(unit) > 1]


def cut_at_row_ends(documents: Documents, capacity: int, sep: int) -> list[list[Tokens]]:
    """Each row's pieces of documents, which take two tokens more."""
    rows: list[list[Tokens]] = [[]]
    for document in documents:
        text = [token for sentence in document for token in sentence]
        while text:
            room = capacity + 2 - sum(len(piece) + 2 for piece in rows[-1])
            if room < 3:
                rows.append([])
                continue
            rows[-1].append(text[: room - 2])
            text = text[room - 2 :]
    return rows


# By packing: what is between [CLS] and the last [SEP] of each sequence; of pairs, their units.
REFERENCES: Mapping[str, Callable[[Documents, int, int], list[Tokens]]] = {
    "full_sentences": full_sentences,
    "contiguous": contiguous,
    "doc_sentences": doc_sentences,
    "segment_pair": with_a_boundary,
    "sentence_pair": two_sentences,
    "sop": with_a_boundary,
}


def documents_of(block: Block) -> Documents:
    sentences = np.split(block.tokens, np.cumsum(block.sentences, dtype=int)[:-1])
    rest = iter([one.tolist() for one in sentences])
    return [[next(rest) for _ in range(size)] for size in block.documents]


def blocks_of(split: CorpusSplit) -> Iterator[Block]:
    return map(split.read_block, range(len(split.index.blocks)))


def packed(block: Block, rules: PackingRules, sep: int) -> list[Tokens]:
    """The sequences of a block, or the units of its pairs, by the rule itself."""
    rows = rules.packing.spans(block, rules).of_rows(np.arange(count(block, rules)))
    text = stream(block, sep)
    return [text[start : start + length].tolist() for ((start, length),) in rows]


def test_every_packing_has_a_reference_here() -> None:
    assert {*REFERENCES, "documents", "best_fit"} == PACKINGS.keys()


def pieces_of(corpus: Corpus, length: int, packing: str) -> list[list[Tokens]]:
    """The pieces of documents in each row of a pass over the corpus."""
    rows = []
    for row in epoch_of(corpus, packing=packing, sequence_length=length)[0]:
        tokens = row[row != corpus.vocabulary.pad].tolist()
        begins = [place for place, token in enumerate(tokens) if token == corpus.vocabulary.cls]
        assert all(tokens[place - 1] == corpus.vocabulary.sep for place in [*begins[1:], 0])
        rows.append([tokens[a + 1 : b - 1] for a, b in pairwise([*begins, len(tokens)])])
    return rows


@pytest.mark.parametrize("length", [16, 64, 200])
def test_documents_in_their_order_are_cut_at_row_ends(corpus: Corpus, length: int) -> None:
    expected = [
        row
        for block in blocks_of(corpus.split("train"))
        for row in cut_at_row_ends(documents_of(block), length - 2, 0)
    ]
    assert pieces_of(corpus, length, "documents") == expected


@pytest.mark.parametrize("length", [16, 64, 200])
def test_best_fit_has_every_token_once_and_cuts_little(corpus: Corpus, length: int) -> None:
    """Cuts besides those of documents longer than a row: few of those that rows' ends make."""
    rows = pieces_of(corpus, length, "best_fit")
    assert all(sum(len(piece) + 2 for piece in row) <= length for row in rows)
    documents = [
        [token for sentence in document for token in sentence]
        for block in blocks_of(corpus.split("train"))
        for document in documents_of(block)
    ]
    tokens = Counter(token for text in documents for token in text)
    assert Counter(token for row in rows for piece in row for token in piece) == tokens
    least = sum(len(slices(text, length - 2)) for text in documents)
    in_order = sum(map(len, pieces_of(corpus, length, "documents")))
    assert sum(map(len, rows)) - least < 0.5 * (in_order - least)


@pytest.mark.parametrize("length", [128, 512, 2048, 8192])
@pytest.mark.parametrize("packing", ["documents", "best_fit"])
def test_less_than_half_a_percent_is_padding(packing: str, length: int) -> None:
    """Of documents as long as Wikipedia's, and of those none of which fits beside another."""
    draw = np.random.default_rng(0)
    rules = PackingRules(packing, length)
    for sizes in (
        np.clip(draw.lognormal(5.8, 1.1, 2000), 8, 60_000).astype(int),
        np.full(2000, int(0.6 * length) if length < 2048 else 400),
    ):
        blocks, used = [], sizes[np.cumsum(sizes) < 500_000]
        blocks = [Block(np.zeros(used.sum(), "u2"), used.astype("u2"), np.ones(len(used), "u4"))]
        spans = rules.packing.spans(joined(blocks * rules.blocks), rules)
        assert spans.lengths.sum() == used.sum() * rules.blocks
        ends = np.add.reduceat(spans.lengths + 2, spans.first[:-1])
        assert ends.max() <= length
        assert 1 - ends.sum() / (length * len(spans)) < 0.005


def test_long_rows_are_made_of_several_blocks(corpus: Corpus) -> None:
    """Every token once, in any number of blocks that are packed as one; their counts add up."""
    split, rules = corpus.split("train"), PackingRules("documents", 8192)
    counts = split.sequence_counts(rules)
    shards = split.index.shards
    heads = [
        first + np.arange(0, n, 4)
        for first, n in zip(shards["first_block"], shards["blocks"], strict=True)
    ]
    assert np.flatnonzero(counts.per_block).tolist() == np.concatenate(heads).tolist()
    rows = pieces_of(corpus, 8192, "documents")
    found = Counter(token for row in rows for piece in row for token in piece)
    tokens = Counter(np.concatenate([block.tokens for block in blocks_of(split)]).tolist())
    assert found == tokens


@pytest.mark.parametrize("length", [16, 64, 200])
@pytest.mark.parametrize("packing", REFERENCES)
def test_a_block_is_packed_as_by_a_plain_loop(corpus: Corpus, packing: str, length: int) -> None:
    rules, sep = PackingRules(packing, length), corpus.vocabulary.sep
    for block in blocks_of(corpus.split("train")):
        expected = REFERENCES[packing](documents_of(block), rules.capacity, sep)
        assert packed(block, rules, sep) == expected
        assert count(block, rules) == len(expected)


@pytest.mark.parametrize("length", [16, 64, 200])
@pytest.mark.parametrize("packing", [one for one in REFERENCES if not PACKINGS[one].pair_labels])
def test_an_epoch_has_the_sequences_of_its_blocks(
    corpus: Corpus, packing: str, length: int
) -> None:
    ids, _, _ = epoch_of(corpus, packing=packing, sequence_length=length)
    pad, sep = corpus.vocabulary.pad, corpus.vocabulary.sep
    expected = [
        sequence
        for block in blocks_of(corpus.split("train"))
        for sequence in REFERENCES[packing](documents_of(block), length - 2, sep)
    ]
    assert [row[row != pad][1:-1].tolist() for row in ids] == expected
