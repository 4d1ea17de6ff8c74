"""Choosing whole words and n-grams of whole words.

The algorithm is that of BERT's and ALBERT's create_pretraining_data. Words are visited in random
order. Each visit draws a length n, with probability proportional to 1/n, and takes the n-gram that
begins there. An n-gram that would exceed the budget is shortened; if even its first word does not
fit, it is skipped. An n-gram that overlaps a word already taken is skipped.

All rows of a batch are processed together, and in each row all visits that cannot influence each
other.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import MaskDraw, array_keys, random_uint32

LOOKAHEAD = 16  # visits examined together


@dataclass(frozen=True)
class Words:
    """The words of R rows, at most W in each, in reading order; and columns S > W without words."""

    columns: NDArray[np.int32]  # [R, S] column of the first token
    sizes: NDArray[np.int32]  # [R, S] tokens; 0 after the last word
    width: int  # W


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
    words = find_words(starts, maskable, margin=longest)
    order = visiting_order(keys, words)
    if longest == 1:
        taken = _greedy(words.sizes, order, budget)
    else:
        taken = _greedy_ngrams(words, order, NgramLengths(keys, words, longest), budget)
    chosen = np.flatnonzero(taken)
    sizes = words.sizes.take(chosen)
    # A token's column is its word's first column and the number of tokens since.
    begins = words.columns.take(chosen) - np.cumsum(sizes) + sizes
    rows = np.repeat(chosen // taken.shape[1], sizes)
    return rows, np.repeat(begins, sizes) + np.arange(len(rows))


def find_words(starts: NDArray[np.bool_], maskable: NDArray[np.bool_], margin: int) -> Words:
    """The words of each row. A word ends at the next word or at a token that is not maskable.

    `margin` is how many columns without words follow those of the row with the most.
    """
    rows, length = starts.shape
    ends_one = starts | ~maskable
    ends_one[:, 0] = True  # a word ends with its row
    boundaries = np.flatnonzero(ends_one).astype(np.int32)
    sizes = np.empty_like(boundaries)
    np.subtract(boundaries[1:], boundaries[:-1], out=sizes[:-1])
    sizes[-1:] = rows * length - boundaries[-1:]
    is_start = starts.ravel().take(boundaries)
    counts = starts.sum(axis=1)
    width = max(1, int(counts.max(initial=0)))
    is_word = np.arange(width + margin) < counts[:, None]
    table = np.zeros((2, *is_word.shape), np.int32)
    table[0][is_word] = boundaries[is_start]
    table[0] -= is_word * np.arange(0, rows * length, length, dtype=np.int32)[:, None]
    table[1][is_word] = sizes[is_start]
    return Words(table[0], table[1], width)


def visiting_order(keys: NDArray[np.uint64], words: Words) -> NDArray[np.int32]:
    """The word numbers of each row in random order, padding last: [R, W]."""
    width = words.width
    numbers = np.arange(width, dtype=np.uint32)
    # The word's number replaces the low bits, so that sorting also yields it and no ties occur.
    bits = np.uint32((1 << (width - 1).bit_length()) - 1)
    draw = random_uint32(keys, numbers)
    draw >>= np.uint32(1)
    draw &= ~bits
    draw |= numbers
    draw[words.sizes[:, :width] == 0] |= np.uint32(1 << 31)
    draw.sort(axis=1)
    draw &= bits
    return draw.view(np.int32)


class NgramLengths:
    """The number of words of the n-gram that begins at a word, p(n) ~ 1/n.

    It is 1 to `longest`, at most the number of adjacent words, and 0 where there is no word. Drawn
    for the words that are asked for: most words of a row are never visited.
    """

    def __init__(self, keys: NDArray[np.uint64], words: Words, longest: int) -> None:
        """`keys` [R] seed the draws; `words` has a margin of `longest`."""
        self.longest = longest
        self._keys = array_keys(MaskDraw.NGRAM, keys.view(np.int64))
        self._is_word = words.sizes > 0
        self._follows = np.zeros(words.sizes.shape, bool)  # the word before it, without a gap
        ends = words.columns[:, :-1] + words.sizes[:, :-1]
        np.equal(words.columns[:, 1:], ends, out=self._follows[:, 1:])
        self._follows &= self._is_word
        shares = np.cumsum(1.0 / np.arange(1, longest + 1))
        # [n - 1, words there are]: an n-gram has more than n words from this draw on.
        self._limits = np.full((longest - 1, longest + 1), 1 << 32, np.uint64)
        self._limits[:, 1:] = np.rint(shares[:-1, None] / shares * 2.0**32)

    def at(self, rows: NDArray[np.int64], words: NDArray[np.integer]) -> NDArray[np.int32]:
        """The lengths at `words` [N, P] of `rows` [N]: [N, P]."""
        place = rows[:, None] * self._is_word.shape[1] + words
        unbroken = self._is_word.take(place)
        lengths, reach = unbroken.astype(np.int32), unbroken.astype(np.intp)
        for more in range(1, self.longest):
            unbroken &= self._follows.take(place + more)
            reach += unbroken
        draw = random_uint32(self._keys[rows], words)
        for limits in self._limits:
            lengths += draw >= limits.take(reach)
        return lengths


def _greedy(
    sizes: NDArray[np.int32], order: NDArray[np.int32], budget: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """The words [R, S] that are taken when each is visited once and taken if it fits.

    The budget left only shrinks. So the first word that does not fit also excludes all later words
    that are larger than the budget left. A few rounds over whole rows therefore suffice.
    """
    width = order.shape[1]
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
    words: Words, order: NDArray[np.int32], lengths: NgramLengths, budget: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """The words [R, S] that are taken when n-grams of `lengths` are visited in `order`."""
    rows, stride = words.sizes.shape
    few = min(words.width, int(budget.max(initial=0)) + 8)  # nearly always enough visits
    first, row = order[:, :few], np.arange(rows)
    n = lengths.at(row, first)
    free = _non_overlapping(first, n, lengths.longest)
    # The budget changes no visit before the first n-gram that exceeds it.
    place = row[:, None] * stride + first
    ends = words.columns + words.sizes
    cost = ends.take(place + np.maximum(n, 1) - 1) - words.columns.take(place)
    spent = np.zeros((rows, few + 1), np.int32)
    np.cumsum(cost * free, axis=1, out=spent[:, 1:])
    curbed = spent[:, :-1] + cost > budget[:, None]
    made = np.where(curbed.any(axis=1), curbed.argmax(axis=1), few)
    free &= np.arange(few) < made[:, None]
    taken = np.zeros((rows, stride), bool)
    for more in range(lengths.longest):
        taken.put(place[free & (n > more)] + more, True)
    left = budget - spent[row, made]
    _VisitState(words, ends, order, n, lengths, taken, made, left).finish()
    return taken


def _non_overlapping(
    first: NDArray[np.int32], n: NDArray[np.int32], longest: int
) -> NDArray[np.bool_]:
    """Which of V visits take their n-gram if no two taken n-grams may overlap: [R, V].

    `first` [R, V] is the first word of each n-gram, all different in a row. `n` [R, V] is its
    number of words, 0 to `longest`. Each round accepts every open n-gram that precedes all open
    n-grams that it overlaps. In reading order only the next few can overlap an n-gram.
    """
    bits = first.shape[1].bit_length()
    fits = int(first.max(initial=0)) < 1 << (31 - bits)  # word and visit, up to L = 100,000 or so
    by_place = first.astype(np.int32 if fits else np.int64, copy=False) << bits
    by_place |= np.arange(first.shape[1], dtype=np.int32)
    by_place.sort(axis=1)
    visit, words = by_place & ((1 << bits) - 1), by_place >> bits
    place = np.arange(0, first.size, first.shape[1])[:, None] + visit
    n = n.take(place)
    near = range(1, min(longest, first.shape[1]))
    touching = [words[:, by:] < words[:, :-by] + n[:, :-by] for by in near]
    later = [visit[:, by:] > visit[:, :-by] for by in near]
    open_, accepted = n > 0, np.zeros(first.shape, bool)
    while open_.any():
        now = open_.copy()
        for by, touches, is_later in zip(near, touching, later, strict=True):
            rivals = touches & open_[:, by:]
            rivals &= open_[:, :-by]
            _clear(now[:, by:], rivals & is_later)
            _clear(now[:, :-by], np.greater(rivals, is_later))
        accepted |= now
        _clear(open_, now)
        for by, touches in zip(near, touching, strict=True):
            _clear(open_[:, by:], touches & now[:, :-by])
            _clear(open_[:, :-by], touches & now[:, by:])
    taken = np.empty_like(accepted)
    taken.put(place, accepted)
    return taken


def _clear(flags: NDArray[np.bool_], where: NDArray[np.bool_]) -> None:
    """``flags &= ~where``, in one pass."""
    np.greater(flags, where, out=flags)


@dataclass(frozen=True)
class _VisitState:
    """The progress of the visits in R rows; the last three fields are updated in place."""

    words: Words
    ends: NDArray[np.int32]  # [R, S] the column after each word
    order: NDArray[np.int32]  # [R, W] word of each visit
    drawn: NDArray[np.int32]  # [R, V] lengths at the first visits
    lengths: NgramLengths
    taken: NDArray[np.bool_]  # [R, S] words
    made: NDArray[np.int64]  # [R] visits made
    left: NDArray[np.int64]  # [R] tokens left of the budget

    def finish(self) -> None:
        """Make the remaining visits one by one, until the budget is used up."""
        width, stride = self.order.shape[1], self.ends.shape[1]
        numbers = np.arange(self.lengths.longest)  # the words of an n-gram
        rows = np.flatnonzero((self.left > 0) & (self.made < width))
        while len(rows):
            visit, left = self.made[rows], self.left[rows]
            visit += self._idle(rows, visit, left)
            self.made[rows] = visit + 1
            if visit.max() >= width:
                remaining = visit < width
                rows, visit, left = rows[remaining], visit[remaining], left[remaining]
            word = self.order.take(rows * width + visit)[:, None]
            place = (rows * stride)[:, None] + word + numbers
            # The tokens of n-grams of 1, 2, ... words.
            cost = self.ends.take(place) - self.words.columns.take(place[:, :1])
            longest = self._lengths(rows, visit, word)
            n = ((numbers < longest) & (cost <= left[:, None])).sum(axis=1)
            disturbed = self.taken.take(place)
            n *= ~(disturbed & (numbers < n[:, None])).any(axis=1)
            within = numbers < n[:, None]
            self.taken.put(place, disturbed | within)
            left -= (cost * within).max(axis=1, initial=0)
            self.left[rows] = left
            rows = rows[(left > 0) & (visit + 1 < width)]

    def _lengths(
        self, rows: NDArray[np.int64], visit: NDArray[np.int64], word: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """The lengths of n-grams at `visit` [N] of `rows` [N], which begin at `word` [N, 1]."""
        if visit.max(initial=0) < self.drawn.shape[1]:
            return self.drawn.take(rows * self.drawn.shape[1] + visit)[:, None]
        return self.lengths.at(rows, word)

    def _idle(
        self, rows: NDArray[np.int64], made: NDArray[np.int64], left: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """How many visits after those `made` in `rows` certainly take nothing, all [N].

        At most `LOOKAHEAD`. Their word is taken already, or is larger than the budget `left`.
        """
        width, stride = self.order.shape[1], self.ends.shape[1]
        visit = made[:, None] + np.arange(LOOKAHEAD)
        word = self.order.take((rows * width)[:, None] + np.minimum(visit, width - 1))
        place = (rows * stride)[:, None] + word
        idle = self.taken.take(place)
        idle |= self.words.sizes.take(place) > left[:, None]
        idle &= visit < width
        return np.where(idle.all(axis=1), LOOKAHEAD, idle.argmin(axis=1))
