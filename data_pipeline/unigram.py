"""Unigram segmentation of ordinary words, thousands at a time.

The same search as in `tokenizers`, by the same sums in double precision, so that ties fall alike:
of all ways to cut a word into pieces the one with the highest sum of scores (Kudo 2018,
arXiv 1804.10959, section 3.2), found from left to right; of equal ones that whose last piece begins
first. It is done for all words together in numpy, several times as fast as one by one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers

from data_pipeline.joined_text import FIRST_BYTES, SPACE

LONGEST = 32  # bytes of a word, the space before it included
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
        # A character that is no piece by itself would be an unknown token.
        self._known = frozenset(
            one for one in ordinary_characters(normalize) & singles if normalize(one) == one
        )
        plain = {
            (" " + text if text != piece else text).encode(): number
            for number, (piece, _) in enumerate(pieces)
            if piece and self._known.issuperset(text := piece.removeprefix(mark))
        }
        used = np.unique([*b"".join(plain)])
        self._columns = np.zeros(256, np.int32)
        self._columns[used] = np.arange(1, len(used) + 1)
        self._columns[SPACE] *= b" " in plain
        # Node 0 leads nowhere, node 1 is the beginning of a piece, the others those of pieces.
        beginnings = {piece[:size] for piece in plain for size in range(1, len(piece) + 1)}
        nodes = {b"": 1, **{one: number for number, one in enumerate(beginnings, 2)}}
        self._next = np.zeros((len(nodes) + 1, len(used) + 1), np.int32)
        parents = [nodes[one[:-1]] for one in beginnings]
        self._next[parents, self._columns[[one[-1] for one in beginnings]]] = (
            np.arange(len(beginnings)) + 2
        )
        ends, ids = [nodes[piece] for piece in plain], [*plain.values()]
        self._ids = np.zeros(len(nodes) + 1, np.int32)
        self._ids[ends] = ids
        self._scores = np.full(len(nodes) + 1, -np.inf)
        self._scores[ends] = [pieces[number][1] for number in ids]

    def __call__(
        self, windows: NDArray[np.uint64], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int32], NDArray[np.int32]]:
        """Which of the words from byte `start` to `end` these are, and for them the ids, end to
        end, and how many each has. `windows` are those of `JoinedText`."""
        sizes = ends - starts
        fits = np.flatnonzero(
            (sizes > 1) & (sizes <= LONGEST) & ((windows[starts] & FIRST_BYTES[1]) == SPACE)
        )
        size = sizes[fits]
        data = _bytes_of(windows, starts[fits], size)
        columns = self._columns[data]  # [bytes, words]
        known = ((columns > 0) == (data > 0)).all(0)
        for word in np.flatnonzero((data > 127).any(0) & known):
            letters = data[1 : size[word], word].tobytes().decode()
            known[word] = self._known.issuperset(letters)
        these = np.zeros(len(starts), bool)
        these[fits[known]] = True
        return these, *self._cut(columns[:, known], size[known])

    def _cut(
        self, columns: NDArray[np.int32], sizes: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The best pieces of each word, of [bytes, words] columns.

        Places are those in `columns`, row after row.
        """
        width, words = columns.shape
        starts, ends, nodes = self._pieces_in(columns)
        rows = np.searchsorted(starts, np.arange(width + 1) * words)
        best = np.full((width + 1) * words, -np.inf)  # of the word up to each place
        best[:words] = 0.0
        last = np.zeros(len(best), np.int32)  # the piece that ends there
        for row in itertools.starmap(slice, itertools.pairwise(rows.tolist())):
            scores = best[starts[row]] + self._scores[nodes[row]]
            better = np.flatnonzero(scores > best[ends[row]])
            best[ends[row][better]] = scores[better]
            last[ends[row][better]] = row.start + better
        return self._read_back(starts, nodes, last, sizes)

    def _pieces_in(
        self, columns: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Where each piece found in the words starts and ends, and its node, by row."""
        _, words = columns.shape
        data = np.append(columns.ravel(), np.zeros(words, np.int32))
        following, width = self._next.ravel(), self._next.shape[1]
        place = np.flatnonzero(data).astype(np.int32)
        start, node = place, np.ones(len(place), np.int32)
        found = [(start[:0], place[:0], node[:0])]
        while len(place):
            node = following[node * width + data[place]]
            goes_on = node > 0
            start, node, place = start[goes_on], node[goes_on], place[goes_on] + words
            piece = self._scores[node] > -np.inf
            found.append((start[piece], place[piece], node[piece]))
        starts, ends, nodes = map(np.concatenate, zip(*found, strict=True))
        order = np.argsort(starts // words, kind="stable")
        return starts[order], ends[order], nodes[order]

    def _read_back(
        self,
        starts: NDArray[np.int32],
        nodes: NDArray[np.int32],
        last: NDArray[np.int32],
        sizes: NDArray[np.int64],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The ids of the pieces, found from the end of each word on."""
        words = len(sizes)
        counts = np.zeros(words, np.int32)
        rounds = []
        place = sizes * words + np.arange(words)
        while len(place):
            piece = last[place]
            word = place % words
            counts[word] += 1
            rounds.append((word, self._ids[nodes[piece]]))
            place = starts[piece]
            place = place[place >= words]
        after = np.cumsum(counts)
        ids = np.zeros(counts.sum(), np.int32)
        for number, (those, found) in enumerate(rounds):
            ids[after[those] - 1 - number] = found
        return ids, counts


def _bytes_of(
    windows: NDArray[np.uint64], starts: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """The bytes of words of at most `LONGEST`, [bytes, words], with zeros behind each."""
    done = np.arange(0, LONGEST, 8)
    places = np.minimum(starts[:, None] + done, len(windows) - 1)
    kept = FIRST_BYTES[np.clip(sizes[:, None] - done, 0, 8)]
    data = (windows[places] & kept).view(np.uint8).T
    return np.ascontiguousarray(data[: sizes.max(initial=0)])


def ordinary_words_of(tokenizer: tokenizers.Tokenizer) -> OrdinaryWords:
    """The ordinary words of a unigram tokenizer whose pre-tokenizer marks each word."""
    assert isinstance(tokenizer.model, models.Unigram)
    assert isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Metaspace)
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    assert tokenizer.normalizer is not None
    return OrdinaryWords(
        vocabulary, tokenizer.pre_tokenizer.replacement, tokenizer.normalizer.normalize_str
    )
