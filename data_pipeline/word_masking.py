"""Choosing whole words and n-grams of whole words.

As in BERT's and ALBERT's create_pretraining_data: words are visited in random order; each visit
draws a length n with probability proportional to 1/n and takes the n-gram that begins there. One
that would exceed the budget is shortened, or passed over when even its first word does not fit;
one that touches a word already taken is passed over. So at most the budget is chosen.

All rows of a batch make their visits together, and a row many of them at once: those that cannot
influence each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import array_keys, words

NGRAM = 14  # what a hash decides; part of its key
AHEAD = 16  # visits that are looked at together
NOBODY = np.iinfo(np.int16).max  # after every rank: rows have at most 2**15 words


@dataclass(frozen=True)
class Words:
    """The words of R rows, at most W in each, in reading order; sizes are 0 beyond the last."""

    columns: NDArray[np.int32]  # [R, W] of the first token
    sizes: NDArray[np.int32]  # [R, W] tokens
    counts: NDArray[np.int64]  # [R] words


def choose_words(
    keys: NDArray[np.uint64],
    starts: NDArray[np.bool_],
    maskable: NDArray[np.bool_],
    budget: NDArray[np.int64],
    longest: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which tokens are chosen: their rows and columns, in reading order.

    `keys` [R]; `starts` [R, L] marks the first token of each word; `maskable` [R, L] the tokens
    that belong to words; `budget` [R] tokens at most; n-grams have 1 to `longest` words.
    """
    found = find_words(starts, maskable)
    order = visits(keys, found)
    if longest == 1:
        taken = _greedy(found.sizes, order, budget)
    else:
        taken = _greedy_ngrams(found, order, ngram_lengths(keys, found, longest), budget)
    row, word = np.nonzero(taken)
    sizes = found.sizes[row, word]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(row, sizes), np.repeat(found.columns[row, word], sizes) + within


def find_words(starts: NDArray[np.bool_], maskable: NDArray[np.bool_]) -> Words:
    """The words of each row: a word ends where the next begins, or where something else stands."""
    rows, length = starts.shape
    ends_one = starts | ~maskable
    ends_one[:, 0] = True  # a word ends with its row
    edges = np.flatnonzero(ends_one)
    sizes = np.diff(edges, append=rows * length)
    is_start = starts.ravel()[edges]
    counts = np.count_nonzero(starts, axis=1)
    columns = edges[is_start] - np.repeat(np.arange(0, rows * length, length), counts)
    width = max(1, int(counts.max(initial=0)))
    there = np.arange(width) < counts[:, None]
    table = np.zeros((2, rows, width), np.int32)
    table[0][there], table[1][there] = columns, sizes[is_start]
    return Words(table[0], table[1], counts)


def visits(keys: NDArray[np.uint64], found: Words) -> NDArray[np.int32]:
    """The words of each row in random order, what is none last: [R, W]."""
    width = found.sizes.shape[1]
    numbers = np.arange(width, dtype=np.uint32)
    # The low bits give way to the word's number: sorting then also tells which, without ties.
    bits = np.uint32((1 << (width - 1).bit_length()) - 1)
    draw = words(keys, numbers)
    draw >>= np.uint32(1)
    draw &= ~bits
    draw |= numbers
    draw[found.sizes == 0] |= np.uint32(1 << 31)
    draw.sort(axis=1)
    draw &= bits
    return draw.view(np.int32)


def ngram_lengths(keys: NDArray[np.uint64], found: Words, longest: int) -> NDArray[np.int32]:
    """How many words the n-gram has that begins at each, p(n) proportional to 1/n: [R, W].

    From 1 to `longest`, as far as words follow each other; 0 where there is no word.
    """
    rows, width = found.sizes.shape
    is_word = found.sizes > 0
    follows = np.zeros((rows, width + longest), bool)
    ends = found.columns + found.sizes
    follows[:, 1:width] = (found.columns[:, 1:] == ends[:, :-1]) & is_word[:, 1:]
    unbroken, reach = is_word, np.zeros((rows, width), np.int8)
    for more in range(1, longest + 1):
        reach += unbroken
        unbroken = unbroken & follows[:, more : more + width]
    draw = words(array_keys(NGRAM, keys.view(np.int64)), np.arange(width))
    lengths = is_word.astype(np.int32)
    for n in range(1, longest):
        # A length of more than n: what the draw must reach where there is room for m words.
        weights = 1.0 / np.arange(1, longest + 1)
        limits = [
            np.rint(weights[:n].sum() / weights[:m].sum() * 2.0**32)
            for m in range(n + 1, longest + 1)
        ]
        limit = np.array([0] * (n + 1) + limits, np.uint32)
        lengths += (draw >= limit[reach]) & (reach > n)
    return lengths


def _greedy(
    sizes: NDArray[np.int32], order: NDArray[np.int32], budget: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """The words [R, W] that are taken when each is visited once and taken if it fits.

    What is left only shrinks: at the first word that does not fit, all later words of more tokens
    than are left drop out together, so a few rounds over whole rows do for all visits.
    """
    width = sizes.shape[1]
    few = min(width, int(budget.max(initial=0)) + 16)  # nearly always enough visits
    for count in (few, width):
        visited = np.take_along_axis(sizes, order[:, :count], axis=1)
        alive = visited > 0
        numbers = np.arange(count)
        while True:
            spent = np.cumsum(visited * alive, axis=1, dtype=np.int32)
            over = alive & (spent > budget[:, None])
            stuck = over.any(axis=1)
            if not stuck.any():
                break
            first = np.where(stuck, over.argmax(axis=1), count)[:, None]
            before = np.where(numbers < first, spent, 0).max(axis=1)
            alive &= (numbers < first) | (visited <= (budget - before)[:, None])
        if (spent[:, -1] == budget).all():
            break
    taken = np.zeros(sizes.shape, bool)
    np.put_along_axis(taken, order[:, :count], alive, axis=1)
    return taken


def _greedy_ngrams(
    found: Words,
    order: NDArray[np.int32],
    lengths: NDArray[np.int32],
    budget: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """The words [R, W] that are taken when n-grams of `lengths` are visited in `order`."""
    rows, width = order.shape
    longest = int(lengths.max(initial=1))
    ends = np.zeros((rows, width + longest + 1), np.int32)
    np.cumsum(found.sizes, axis=1, out=ends[:, 1 : width + 1])
    ends[:, width + 1 :] = ends[:, width : width + 1]
    few = min(width, int(budget.max(initial=0)) + 8)  # nearly always enough visits
    soon = order[:, :few]
    ranks = np.full((rows, width), NOBODY, np.int16)
    np.put_along_axis(ranks, soon, np.arange(few, dtype=np.int16)[None], axis=1)
    free = _undisturbed(ranks, lengths, longest)
    # In the order of the visits: as long as there is room for an n-gram, the budget has no say.
    n = np.take_along_axis(lengths, soon, axis=1)
    cost = np.take_along_axis(ends, soon + n, axis=1) - np.take_along_axis(ends, soon, axis=1)
    spent = np.zeros((rows, few + 1), np.int32)
    np.cumsum(cost * np.take_along_axis(free, soon, axis=1), axis=1, out=spent[:, 1:])
    curbed = spent[:, :-1] + cost > budget[:, None]
    begun = np.where(curbed.any(axis=1), curbed.argmax(axis=1), few)
    left = budget - spent[np.arange(rows), begun]
    free &= ranks < begun[:, None]
    taken = np.zeros((rows, width + longest), bool)
    for more in range(longest):
        taken[:, more : more + width] |= free & (more < lengths)
    _fill_up(taken, ends, order, lengths, begun, left)
    return taken[:, :width]


def _undisturbed(
    ranks: NDArray[np.int16], lengths: NDArray[np.int32], longest: int
) -> NDArray[np.bool_]:
    """The n-grams [R, W] that are taken, visited by rank, when none may touch one that was.

    In every round all go at once that come before whatever else is open and touches them.
    """
    rows, width = ranks.shape
    covers = [lengths > more for more in range(longest)]  # the word so far on
    open_ = (ranks < NOBODY) & covers[0]
    accepted = np.zeros_like(open_)
    taken = np.zeros((rows, width + longest), bool)
    while open_.any():
        rank = np.where(open_, ranks, NOBODY)
        first = np.full((rows, width + longest), NOBODY, np.int16)  # that covers a word
        for more, covered in enumerate(covers):
            part = first[:, more : more + width]
            np.minimum(part, np.where(covered, rank, NOBODY), out=part)
        now = open_.copy()
        for more, covered in enumerate(covers):
            now &= ~covered | (first[:, more : more + width] == rank)
        accepted |= now
        for more, covered in enumerate(covers):
            taken[:, more : more + width] |= now & covered
        for more, covered in enumerate(covers):
            open_ = open_ & ~(covered & taken[:, more : more + width])
    return accepted


def _fill_up(
    taken: NDArray[np.bool_],
    ends: NDArray[np.int32],
    order: NDArray[np.int32],
    lengths: NDArray[np.int32],
    begun: NDArray[np.int64],
    left: NDArray[np.int64],
) -> None:
    """Make the visits from number `begun` on one after the other, as far as tokens are `left`."""
    width = order.shape[1]
    numbers = np.arange(taken.shape[1] - width)  # the words of an n-gram
    rows = np.flatnonzero((left > 0) & (begun < width))
    while len(rows):
        begun[rows] += _idle_visits(taken, ends, order, rows, begun, left)
        rows = rows[begun[rows] < width]
        row, word = rows[:, None], order[rows, begun[rows]][:, None]
        cost = ends[row, word + numbers + 1] - ends[row, word]  # of n-grams of 1, 2, ... words
        n = ((numbers < lengths[row, word]) & (cost <= left[row])).sum(axis=1)
        disturbed = taken[row, word + numbers]
        n *= ~(disturbed & (numbers < n[:, None])).any(axis=1)
        taken[row, word + numbers] = disturbed | (numbers < n[:, None])
        left[rows] -= np.where(n > 0, cost[np.arange(len(rows)), n - 1], 0)
        begun[rows] += 1
        rows = rows[(left[rows] > 0) & (begun[rows] < width)]


def _idle_visits(
    taken: NDArray[np.bool_],
    ends: NDArray[np.int32],
    order: NDArray[np.int32],
    rows: NDArray[np.int64],
    begun: NDArray[np.int64],
    left: NDArray[np.int64],
) -> NDArray[np.int64]:
    """How many visits of some rows certainly take nothing, from `begun` on, `AHEAD` at most.

    Their word is taken, or larger than what is left.
    """
    visit = begun[rows, None] + np.arange(AHEAD)
    row = rows[:, None]
    word = order[row, np.minimum(visit, order.shape[1] - 1)]
    idle = taken[row, word] | (ends[row, word + 1] - ends[row, word] > left[row])
    idle &= visit < order.shape[1]
    return np.where(idle.all(axis=1), AHEAD, idle.argmin(axis=1))
