"""Choosing whole words and n-grams of whole words.

The algorithm is that of BERT's and ALBERT's create_pretraining_data. Words are visited in random
order. Each visit draws a length n, with probability proportional to 1/n, and takes the n-gram that
begins there. An n-gram that would exceed the budget is shortened; if even its first word does not
fit, it is skipped. An n-gram that overlaps a word already taken is skipped.

All rows of a batch are processed together, and in each row all visits that cannot influence each
other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import array_keys, random_uint32

NGRAM = 14  # domain tag: what a hash decides, in its key
LOOKAHEAD = 16  # visits examined together


@dataclass(frozen=True)
class Words:
    """The words of R rows, at most W in each, in reading order."""

    columns: NDArray[np.int32]  # [R, W] column of the first token
    sizes: NDArray[np.int32]  # [R, W] tokens; 0 after the last word
    counts: NDArray[np.int64]  # [R] words


def choose_words(
    keys: NDArray[np.uint64],
    starts: NDArray[np.bool_],
    maskable: NDArray[np.bool_],
    budget: NDArray[np.int64],
    longest: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The chosen tokens, as (rows, columns) in reading order.

    `keys` [R] seed the draws. `starts` [R, L] marks the first token of each word and `maskable`
    [R, L] all tokens of words. At most `budget` [R] tokens are chosen in a row. N-grams have 1 to
    `longest` words.
    """
    found = find_words(starts, maskable)
    order = visiting_order(keys, found)
    if longest == 1:
        taken = _greedy(found.sizes, order, budget)
    else:
        taken = _greedy_ngrams(found, order, ngram_lengths(keys, found, longest), budget)
    row, word = np.nonzero(taken)
    sizes = found.sizes[row, word]
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(row, sizes), np.repeat(found.columns[row, word], sizes) + within


def find_words(starts: NDArray[np.bool_], maskable: NDArray[np.bool_]) -> Words:
    """The words of each row. A word ends at the next word or at a token that is not maskable."""
    rows, length = starts.shape
    ends_one = starts | ~maskable
    ends_one[:, 0] = True  # a word ends with its row
    boundaries = np.flatnonzero(ends_one)
    sizes = np.diff(boundaries, append=rows * length)
    is_start = starts.ravel()[boundaries]
    counts = np.count_nonzero(starts, axis=1)
    columns = boundaries[is_start] - np.repeat(np.arange(0, rows * length, length), counts)
    width = max(1, int(counts.max(initial=0)))
    there = np.arange(width) < counts[:, None]
    table = np.zeros((2, rows, width), np.int32)
    table[0][there], table[1][there] = columns, sizes[is_start]
    return Words(table[0], table[1], counts)


def visiting_order(keys: NDArray[np.uint64], found: Words) -> NDArray[np.int32]:
    """The word numbers of each row in random order, padding last: [R, W]."""
    width = found.sizes.shape[1]
    numbers = np.arange(width, dtype=np.uint32)
    # The word's number replaces the low bits, so that sorting also yields it and no ties occur.
    bits = np.uint32((1 << (width - 1).bit_length()) - 1)
    draw = random_uint32(keys, numbers)
    draw >>= np.uint32(1)
    draw &= ~bits
    draw |= numbers
    draw[found.sizes == 0] |= np.uint32(1 << 31)
    draw.sort(axis=1)
    draw &= bits
    return draw.view(np.int32)


def ngram_lengths(keys: NDArray[np.uint64], found: Words, longest: int) -> NDArray[np.int32]:
    """The number of words of the n-gram that begins at each word, p(n) ~ 1/n: [R, W].

    It is 1 to `longest`, at most the number of adjacent words, and 0 where there is no word.
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
    draw = random_uint32(array_keys(NGRAM, keys.view(np.int64)), np.arange(width))
    lengths = is_word.astype(np.int32)
    shares = np.cumsum(1.0 / np.arange(1, longest + 1))
    for room in range(2, longest + 1):
        has_room = reach == room
        for n in range(1, room):
            limit = np.uint32(np.rint(shares[n - 1] / shares[room - 1] * 2.0**32))
            lengths += has_room & (draw >= limit)  # more than n words
    return lengths


def _greedy(
    sizes: NDArray[np.int32], order: NDArray[np.int32], budget: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """The words [R, W] that are taken when each is visited once and taken if it fits.

    The budget left only shrinks. So the first word that does not fit also excludes all later words
    that are larger than the budget left. A few rounds over whole rows therefore suffice.
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
    first = order[:, :few]
    n = np.take_along_axis(lengths, first, axis=1)
    free = _non_overlapping(first, n, longest)
    # The budget changes no visit before the first n-gram that exceeds it.
    cost = np.take_along_axis(ends, first + n, axis=1) - np.take_along_axis(ends, first, axis=1)
    spent = np.zeros((rows, few + 1), np.int32)
    np.cumsum(cost * free, axis=1, out=spent[:, 1:])
    curbed = spent[:, :-1] + cost > budget[:, None]
    made = np.where(curbed.any(axis=1), curbed.argmax(axis=1), few)
    row, visit = np.nonzero(free & (np.arange(few) < made[:, None]))
    taken = np.zeros((rows, width + longest), bool)
    for more in range(longest):
        long = n[row, visit] > more
        taken[row[long], first[row, visit][long] + more] = True
    left = budget - spent[np.arange(rows), made]
    _VisitState(order, lengths, ends, taken, made, left).finish()
    return taken[:, :width]


def _non_overlapping(
    first: NDArray[np.int32], n: NDArray[np.int32], longest: int
) -> NDArray[np.bool_]:
    """Which of V visits take their n-gram if no two taken n-grams may overlap: [R, V].

    `first` [R, V] is the first word of each n-gram, all different in a row. `n` [R, V] is its
    number of words, 0 to `longest`. Each round accepts every open n-gram that precedes all open
    n-grams that it overlaps. In reading order only the next few can overlap an n-gram.
    """
    bits = first.shape[1].bit_length()  # word and visit fit into 31 bits: at most 2**15 words
    by_place = first << bits | np.arange(first.shape[1], dtype=np.int32)
    by_place.sort(axis=1)
    visit, words = by_place & ((1 << bits) - 1), by_place >> bits
    n = np.take_along_axis(n, visit, axis=1)
    near = range(1, min(longest, first.shape[1]))
    touching = [words[:, by:] < words[:, :-by] + n[:, :-by] for by in near]
    later = [visit[:, by:] > visit[:, :-by] for by in near]
    open_, accepted = n > 0, np.zeros(first.shape, bool)
    while open_.any():
        now = open_.copy()
        for by, touches, is_later in zip(near, touching, later, strict=True):
            rivals = touches & open_[:, by:] & open_[:, :-by]
            now[:, by:] &= ~(rivals & is_later)
            now[:, :-by] &= ~rivals | is_later
        accepted |= now
        open_ &= ~now
        for by, touches in zip(near, touching, strict=True):
            open_[:, by:] &= ~(touches & now[:, :-by])
            open_[:, :-by] &= ~(touches & now[:, by:])
    found = np.empty_like(accepted)
    np.put_along_axis(found, visit, accepted, axis=1)
    return found


@dataclass(frozen=True)
class _VisitState:
    """The progress of the visits in R rows; the last three fields are updated in place."""

    order: NDArray[np.int32]  # [R, W] word of each visit
    lengths: NDArray[np.int32]  # [R, W] words of the n-gram that begins at each word
    ends: NDArray[np.int32]  # [R, W + longest + 1] tokens before each word
    taken: NDArray[np.bool_]  # [R, W + longest] words
    made: NDArray[np.int64]  # [R] visits made
    left: NDArray[np.int64]  # [R] tokens left of the budget

    def finish(self) -> None:
        """Make the remaining visits one by one, until the budget is used up."""
        width = self.order.shape[1]
        numbers = np.arange(self.taken.shape[1] - width)  # the words of an n-gram
        rows = np.flatnonzero((self.left > 0) & (self.made < width))
        while len(rows):
            self.made[rows] += self._idle(rows)
            rows = rows[self.made[rows] < width]
            row, word = rows[:, None], self.order[rows, self.made[rows]][:, None]
            # The tokens of n-grams of 1, 2, ... words.
            cost = self.ends[row, word + numbers + 1] - self.ends[row, word]
            n = ((numbers < self.lengths[row, word]) & (cost <= self.left[row])).sum(axis=1)
            disturbed = self.taken[row, word + numbers]
            n *= ~(disturbed & (numbers < n[:, None])).any(axis=1)
            self.taken[row, word + numbers] = disturbed | (numbers < n[:, None])
            self.left[rows] -= np.where(n > 0, cost[np.arange(len(rows)), n - 1], 0)
            self.made[rows] += 1
            rows = rows[(self.left[rows] > 0) & (self.made[rows] < width)]

    def _idle(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of the next visits of `rows` certainly take nothing, at most `LOOKAHEAD`.

        Their word is taken already, or is larger than the budget left.
        """
        visit = self.made[rows, None] + np.arange(LOOKAHEAD)
        row = rows[:, None]
        word = self.order[row, np.minimum(visit, self.order.shape[1] - 1)]
        size = self.ends[row, word + 1] - self.ends[row, word]
        idle = self.taken[row, word] | (size > self.left[row])
        idle &= visit < self.order.shape[1]
        return np.where(idle.all(axis=1), LOOKAHEAD, idle.argmin(axis=1))
