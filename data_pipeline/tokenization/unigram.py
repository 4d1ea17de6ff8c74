"""Unigram segmentation of ordinary words, thousands at a time.

The same search as in `tokenizers`, by the same sums in double precision, so that ties fall alike:
of all ways to cut a word into pieces the one with the highest sum of scores (Kudo 2018,
arXiv 1804.10959, section 3.2), found from left to right; of equal ones that whose last piece begins
first. Here it is compiled, and knows nothing of normalization, offsets and unknown characters.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers

from data_pipeline.text.compiled import compiled
from data_pipeline.text.joined_text import SPACE

# Printable ASCII, Latin, Greek, Cyrillic, dashes and quotes: each is a cluster of its own.
_RANGES = ((0x21, 0x7E), (0xC0, 0x24F), (0x391, 0x3C9), (0x400, 0x481), (0x2010, 0x2027))


def ordinary_characters(normalize: Callable[[str], str]) -> frozenset[str]:
    """Characters of which words can be made whose normalization knows no context: they are clusters
    of their own, and there is no white space in what they are mapped to."""
    ranges = (range(first, last + 1) for first, last in _RANGES)
    characters = map(chr, itertools.chain.from_iterable(ranges))
    return frozenset(one for one in characters if normalize(f"x{one}x").count(" ") == 0)


class OrdinaryWords:
    """Cuts words of a space and ordinary characters into pieces."""

    def __init__(
        self, pieces: Sequence[tuple[str, float]], mark: str, normalize: Callable[[str], str]
    ) -> None:
        """`pieces` are those of the vocabulary in the order of their ids, with their scores; `mark`
        stands for the space in them."""
        singles = {piece for piece, _ in pieces if len(piece) == 1}
        # A character that is no piece by itself would be an unknown token: no piece here has one,
        # so that no word with one can be made of them.
        known = frozenset(
            one for one in ordinary_characters(normalize) & singles if normalize(one) == one
        )
        plain = {
            (" " + text if text != piece else text).encode(): number
            for number, (piece, _) in enumerate(pieces)
            if piece and known.issuperset(text := piece.removeprefix(mark))
        }
        used = np.unique([*b"".join(plain)])
        self._columns = np.zeros(256, np.int32)
        self._columns[used] = np.arange(1, len(used) + 1)
        # Where the mark is no piece by itself, words that need it so are not for these.
        self._columns[SPACE] *= b" " in plain
        # Node 0 leads nowhere, node 1 is the beginning of a piece, the others those of pieces.
        beginnings = {piece[:size] for piece in plain for size in range(1, len(piece) + 1)}
        nodes = {b"": 1, **{one: number for number, one in enumerate(beginnings, 2)}}
        self._next = np.zeros((len(nodes) + 1, len(used) + 1), np.int32)
        parents = [nodes[one[:-1]] for one in beginnings]
        self._next[parents, self._columns[[one[-1] for one in beginnings]]] = (
            np.arange(len(beginnings)) + 2
        )
        self._next[:, 0] = 0
        ends, ids = [nodes[piece] for piece in plain], [*plain.values()]
        self._ids = np.zeros(len(nodes) + 1, np.int32)
        self._ids[ends] = ids
        self._scores = np.full(len(nodes) + 1, -np.inf)
        self._scores[ends] = [pieces[number][1] for number in ids]

    def __call__(
        self, data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int32], NDArray[np.int32]]:
        """Which of the words from byte `start` to `end` these are, [words], and for them the ids,
        end to end, and how many each has."""
        fits = np.flatnonzero((ends - starts > 1) & (data[starts] == SPACE))
        words = (data, starts[fits], ends[fits])
        ids, sizes = _best_pieces(*words, self._columns, self._next, self._scores, self._ids)
        these = np.zeros(len(starts), bool)
        these[fits] = sizes > 0
        return these, ids, sizes[sizes > 0]


@compiled
def _best_pieces(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    columns: NDArray[np.int32],
    following: NDArray[np.int32],
    scores: NDArray[np.float64],
    pieces: NDArray[np.int32],
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The ids of the best pieces of words, end to end, and how many each has; 0 where there are
    none. Of each node: the ones `following` by column, the score, and the piece."""
    sizes = ends - starts
    ids, counts = np.empty(sizes.sum(), np.int32), np.zeros(len(sizes), np.int32)
    longest = sizes.max() if len(sizes) else 0
    best = np.empty(longest + 1)  # score of the word up to each byte
    last = np.empty(longest + 1, np.int32)  # the byte at which its last piece begins
    piece = np.empty(longest + 1, np.int32)  # that piece
    total = 0
    for word in range(len(sizes)):
        size = sizes[word]
        best[0], best[1 : size + 1] = 0.0, -np.inf
        for start in range(size):
            node = 1 if best[start] > -np.inf else 0
            end = start
            while node and end < size:
                node = following[node, columns[data[starts[word] + end]]]
                end += 1
                score = best[start] + scores[node]
                if score > best[end]:
                    best[end], last[end], piece[end] = score, start, pieces[node]
        if best[size] > -np.inf:
            counts[word] = _read_back(last, piece, size, ids[total:])
            total += counts[word]
    return ids[:total].copy(), counts


@compiled
def _read_back(
    last: NDArray[np.int32], piece: NDArray[np.int32], size: int, ids: NDArray[np.int32]
) -> int:
    """Put the pieces of a word at the front of `ids`; returns how many they are."""
    count, end = 0, size
    while end:
        count, end = count + 1, last[end]
    end = size
    for place in range(count - 1, -1, -1):
        ids[place], end = piece[end], last[end]
    return count


def ordinary_words_of(tokenizer: tokenizers.Tokenizer) -> OrdinaryWords:
    """The ordinary words of a unigram tokenizer whose pre-tokenizer marks each word."""
    assert isinstance(tokenizer.model, models.Unigram)
    assert isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace)
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    assert tokenizer.normalizer is not None
    return OrdinaryWords(
        vocabulary, tokenizer.pre_tokenizer.replacement, tokenizer.normalizer.normalize_str
    )
