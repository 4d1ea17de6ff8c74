"""The rule of every packing against a plain loop over the sentences of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pytest

from data_pipeline import Corpus, CorpusSplit
from data_pipeline.packing.kinds import PACKINGS
from data_pipeline.packing.sequences import PackingRules, count, stream
from data_pipeline.shards.blocks import Block
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
    assert REFERENCES.keys() == PACKINGS.keys()


@pytest.mark.parametrize("length", [16, 64, 200])
@pytest.mark.parametrize("packing", REFERENCES)
def test_a_block_is_packed_as_by_a_plain_loop(corpus: Corpus, packing: str, length: int) -> None:
    rules, sep = PackingRules(packing, length), corpus.vocabulary.sep
    for block in blocks_of(corpus.split("train")):
        expected = REFERENCES[packing](documents_of(block), rules.capacity, sep)
        assert packed(block, rules, sep) == expected
        assert count(block, rules) == len(expected)


@pytest.mark.parametrize("length", [16, 64, 200])
@pytest.mark.parametrize("packing", [one for one in PACKINGS if not PACKINGS[one].pair_labels])
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
