"""Choosing whole words and n-grams of whole words.

As in BERT's and ALBERT's create_pretraining_data: words are visited in random order; each visit
draws a length n with probability proportional to 1/n and takes the n-gram that begins there. One
that would exceed the budget is shortened, or passed over when even its first word does not fit;
one that touches a word already taken is passed over. So at most the budget is chosen. All rows of
a batch make their visits together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import array_keys, words

NGRAM = 14  # what a hash decides; part of its key


def choose_words(
    keys: NDArray[np.uint64],
    starts: NDArray[np.bool_],
    maskable: NDArray[np.bool_],
    budget: NDArray[np.int64],
    longest: int,
) -> NDArray[np.bool_]:
    """Which columns are chosen: [R, L].

    `keys` [R]; `starts` [R, L] marks the first token of each word; `maskable` [R, L] the tokens
    that belong to words; `budget` [R] tokens at most; n-grams have 1 to `longest` words.
    """
    rows, length = starts.shape
    word_of = np.cumsum(starts, axis=1) - 1  # [R, L]
    word_count = word_of[:, -1] + 1
    sizes = _sizes(word_of, maskable)  # [R, L + 16], by word
    ends = np.concatenate([np.zeros((rows, 1), np.int64), np.cumsum(sizes, axis=1)], axis=1)
    if longest == 1:
        taken = _greedy_words(sizes, _visits(keys, word_count, length), budget)
        return np.take_along_axis(taken, np.maximum(word_of, 0), axis=1) & maskable
    barrier = _after_gap(word_of, starts, maskable, sizes.shape[1])
    order = _visits(keys, word_count, length)
    wanted = _lengths(keys, order, longest)
    taken = np.zeros((rows, length + longest), bool)
    left = budget.copy()
    every_row = np.arange(rows)
    for visit in range(int(word_count.max(initial=0))):
        word, want = order[:, visit], wanted[:, visit]
        if not (left > 0).any():
            break
        n = np.zeros(rows, np.int64)
        free = (left > 0) & (visit < word_count)
        for more in range(1, longest + 1):
            cost = ends[every_row, word + more] - ends[every_row, word]
            free &= ~taken[every_row, word + more - 1] & (word + more <= word_count)
            if more > 1:
                free &= ~barrier[every_row, word + more - 1]
            fits = free & (cost <= left) & (more <= want)
            n = np.where(fits, more, n)
        left -= ends[every_row, word + n] - ends[every_row, word]
        for more in range(longest):
            taken[every_row, word + more] |= more < n
    chosen = np.take_along_axis(taken, np.maximum(word_of, 0), axis=1)
    return chosen & maskable


def _greedy_words(
    sizes: NDArray[np.int64], order: NDArray[np.int64], budget: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """The words [R, width] that are taken when each is visited once and taken if it fits.

    What is left only shrinks: at the first word that does not fit, all later words of more tokens
    than are left drop out together, so a few rounds over whole rows do for all visits.
    """
    visited = np.take_along_axis(sizes, order, axis=1)
    alive = visited > 0
    visits = np.arange(order.shape[1])
    while True:
        spent = np.cumsum(np.where(alive, visited, 0), axis=1)
        over = alive & (spent > budget[:, None])
        stuck = over.any(axis=1)
        if not stuck.any():
            break
        first = np.where(stuck, over.argmax(axis=1), order.shape[1])[:, None]
        before = np.where(visits < first, spent, 0).max(axis=1)
        alive &= (visits < first) | (visited <= (budget - before)[:, None])
    taken = np.zeros(sizes.shape, bool)
    np.put_along_axis(taken, order, alive, axis=1)
    return taken


def _sizes(word_of: NDArray[np.int64], maskable: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Tokens of each word: [R, L + 16], zero beyond the last word."""
    rows, length = word_of.shape
    width = length + 16
    flat = (np.arange(rows)[:, None] * width + word_of)[maskable]
    return np.bincount(flat, minlength=rows * width).reshape(rows, width)


def _after_gap(
    word_of: NDArray[np.int64],
    starts: NDArray[np.bool_],
    maskable: NDArray[np.bool_],
    width: int,
) -> NDArray[np.bool_]:
    """Whether something else stands between each word and the one before: [R, width]."""
    table = np.zeros((len(word_of), width), bool)
    row, column = np.nonzero(starts & ~np.roll(maskable, 1, axis=1))
    table[row, word_of[row, column]] = True
    return table


def _visits(
    keys: NDArray[np.uint64], word_count: NDArray[np.int64], length: int
) -> NDArray[np.int64]:
    """The words of each row in random order, padding last: [R, L]."""
    order = words(keys, np.arange(length)).astype(np.int64)
    order[np.arange(length) >= word_count[:, None]] = 1 << 32
    return np.argsort(order, axis=1, kind="stable")


def _lengths(keys: NDArray[np.uint64], order: NDArray[np.int64], longest: int) -> NDArray[np.int64]:
    """The n that each visit draws, 1 to `longest`, p(n) proportional to 1/n: [R, L]."""
    weights = 1.0 / np.arange(1, longest + 1)
    limits = np.cumsum(weights)[:-1] / weights.sum() * 2.0**32
    return 1 + np.searchsorted(
        limits, words(array_keys(NGRAM, keys.view(np.int64)), order), "right"
    )
