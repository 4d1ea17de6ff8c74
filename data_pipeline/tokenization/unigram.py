"""Unigram segmentation of thousands of ordinary words at a time.

This is the Viterbi search of `tokenizers`, compiled. It finds the segmentation with the highest sum
of scores (Kudo 2018, arXiv 1804.10959, section 3.2). Sums are in double precision, in the same
order, so ties fall alike: the segmentation whose last piece begins first wins. Normalization,
offsets and unknown characters are left out; an "ordinary" word needs none of them.
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
    """Characters that are normalized independently of their neighbours.

    Each is a grapheme cluster of its own and does not map to white space.
    """
    ranges = (range(first, last + 1) for first, last in _RANGES)
    characters = map(chr, itertools.chain.from_iterable(ranges))
    return frozenset(
        character for character in characters if normalize(f"x{character}x").count(" ") == 0
    )


class OrdinaryWords:
    """Segments words that consist of a space and ordinary characters."""

    def __init__(
        self, pieces: Sequence[tuple[str, float]], mark: str, normalize: Callable[[str], str]
    ) -> None:
        """`pieces` is the vocabulary with its scores, in id order; `mark` stands for a space."""
        singles = {piece for piece, _ in pieces if len(piece) == 1}
        # A character that is not a piece by itself would become an unknown token. Pieces with such
        # a character are left out, so that no word with one can be segmented here.
        known = frozenset(
            character
            for character in ordinary_characters(normalize) & singles
            if normalize(character) == character
        )
        plain = {
            (" " + text if text != piece else text).encode(): number
            for number, (piece, _) in enumerate(pieces)
            if piece and known.issuperset(text := piece.removeprefix(mark))
        }
        used = np.unique([*b"".join(plain)])
        self._columns = np.zeros(256, np.int32)
        self._columns[used] = np.arange(1, len(used) + 1)
        # If the mark is not a piece by itself, no word that needs it as one is segmented here.
        self._columns[SPACE] *= b" " in plain
        # The nodes of a trie: 0 is the dead end, 1 the root, the others are prefixes of pieces.
        beginnings = {piece[:size] for piece in plain for size in range(1, len(piece) + 1)}
        nodes = {b"": 1, **{start: number for number, start in enumerate(beginnings, 2)}}
        self._next = np.zeros((len(nodes) + 1, len(used) + 1), np.int32)
        parents = [nodes[start[:-1]] for start in beginnings]
        self._next[parents, self._columns[[start[-1] for start in beginnings]]] = (
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
        """(whether each word can be segmented [words], their concatenated ids, ids per such word).

        Word i spans the bytes from ``starts[i]`` up to ``ends[i]`` of `data`.
        """
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
    """The concatenated ids of the best segmentations, and the number of ids per word (0: none).

    `following` [nodes, columns] are the edges of the trie; `scores` and `pieces` [nodes] belong to
    the piece that ends at a node.
    """
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
            counts[word] = _backtrack(last, piece, size, ids[total:])
            total += counts[word]
    return ids[:total].copy(), counts


@compiled
def _backtrack(
    last: NDArray[np.int32], piece: NDArray[np.int32], size: int, ids: NDArray[np.int32]
) -> int:
    """Write the pieces of a word to the front of `ids`; returns their number."""
    count, end = 0, size
    while end:
        count, end = count + 1, last[end]
    end = size
    for place in range(count - 1, -1, -1):
        ids[place], end = piece[end], last[end]
    return count


def ordinary_words_of(tokenizer: tokenizers.Tokenizer) -> OrdinaryWords:
    """The segmenter for a unigram tokenizer with a Metaspace pre-tokenizer."""
    assert isinstance(tokenizer.model, models.Unigram)
    assert isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace)
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    assert tokenizer.normalizer is not None
    return OrdinaryWords(
        vocabulary, tokenizer.pre_tokenizer.replacement, tokenizer.normalizer.normalize_str
    )
