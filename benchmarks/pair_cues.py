"""What tells the label of a pair without its meaning: lengths, and words that segments share.

    python benchmarks/pair_cues.py CORPUS [--pairs 20000] [--words]

CORPUS is a folder made by ``tandem data build ... --val-fraction 0.5``. A rule is learned on pairs
of the training split and judged on at least `--pairs` held-out ones, whose documents it has not
seen; both labels weigh the same, so that 0.5 is guessing. Epochs are joined until there are enough
pairs, ten at most: a split that would be read more often is refused. Beside our packings stand the
algorithms of BERT's and ALBERT's create_pretraining_data, of which only the lengths are made here.

`--words` asks instead how well the likeness of the two segments' words (cosine, rare words weigh
more) tells a next segment from one of a block, of a pool (two or three blocks of a shard) and of
the whole split: negatives from nearby are harder if the text is sorted.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline import Corpus, CorpusSplit, DataError
from data_pipeline.hashing import scalar_key
from data_pipeline.order import EpochOrder
from data_pipeline.packing.kinds.pairs import PairSpans, Pool, pair_spans
from data_pipeline.packing.sequences import PackingRules, stream
from data_pipeline.shards.blocks import Block

LENGTHS = (128, 512)
KINDS = ("segment_pair", "sentence_pair", "sop")
MOST_EPOCHS = 10  # of more, nearly all pairs would be of text that has been counted before
BINS = 20
SHORT = 0.1  # BERT's short_seq_prob

Labelled = tuple[NDArray[Any], NDArray[Any]]  # [pairs, cues] and [pairs] labels
Documents = list[list[int]]  # tokens of each sentence


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus")
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--words", action="store_true")
    options = parser.parse_args()
    try:
        corpus = Corpus.open(options.corpus)
        splits = corpus.split("train"), corpus.split("val")
    except DataError as error:
        sys.exit(str(error))
    for split in splits:
        require_enough(split, options.pairs)
    (print_words if options.words else print_lengths)(*splits, options.pairs)


def require_enough(split: CorpusSplit, least: int) -> None:
    """Exit if MOST_EPOCHS epochs of a split do not make this many pairs of every kind."""
    rules = [PackingRules(kind, max(LENGTHS)) for kind in KINDS]
    pairs = min(split.sequence_counts(one).total for one in rules)
    if pairs * MOST_EPOCHS < least:
        sys.exit(
            f"{split.name}: {split.index.documents:,} documents make {pairs:,} pairs of "
            f"{max(LENGTHS)} tokens, too few for --pairs {least}: build the corpus with "
            f"--val-fraction 0.5 or of more text, or ask for --pairs {pairs * MOST_EPOCHS} at most"
        )


def print_lengths(train: CorpusSplit, held_out: CorpusSplit, least: int) -> None:
    """The accuracy of a rule about lengths, for each packing and both originals."""
    print("| pairs | length | short | held-out pairs | told from lengths |\n|---|---|---|---|---|")
    for length in LENGTHS:
        for kind in KINDS:
            for short in (0.0, SHORT):
                rules = PackingRules(kind, length, short)
                found = [repeat(partial(ours, one, rules), least) for one in (train, held_out)]
                print_row(kind, length, short, *found)
        for name, swap in (("BERT's algorithm", False), ("ALBERT's algorithm", True)):
            texts = [documents(split.index.boundaries()) for split in (train, held_out)]
            found = [repeat(partial(original, one, length, swap), least) for one in texts]
            print_row(name, length, SHORT, *found)


def print_row(name: str, length: int, short: float, fit: Labelled, held_out: Labelled) -> None:
    """One row of the table of lengths."""
    told = accuracy(fit, held_out)
    print(f"| {name} | {length} | {short} | {len(held_out[1]):,} | {told:.3f} |", flush=True)


def repeat(epoch: Callable[[int], Labelled], least: int) -> Labelled:
    """Epochs joined until there are enough pairs."""
    parts = [epoch(0)]
    while sum(len(labels) for _, labels in parts) < least:
        parts.append(epoch(len(parts)))
    cues, labels = zip(*parts, strict=True)
    return np.concatenate(cues), np.concatenate(labels)


def accuracy(fit: Labelled, held_out: Labelled) -> float:
    """How many of the held-out labels a table of two cues, learned on `fit`, tells; 0.5 is none.

    The table has a cell for each pair of `BINS` quantiles; both labels weigh the same.
    """
    edges = np.quantile(fit[0][:, :2], np.linspace(0, 1, BINS + 1)[1:-1], axis=0)

    def cell(cues: NDArray[Any]) -> NDArray[np.int64]:
        rows, columns = (np.searchsorted(edges[:, n], cues[:, n], side="right") for n in (0, 1))
        return rows * BINS + columns

    shares = [
        np.bincount(cell(fit[0][fit[1] == label]), minlength=BINS**2) / (fit[1] == label).sum()
        for label in (0, 1)
    ]
    told = (shares[1] > shares[0])[cell(held_out[0])] == held_out[1]
    return float(np.mean([told[held_out[1] == label].mean() for label in (0, 1)]))


def ours(split: CorpusSplit, rules: PackingRules, epoch: int) -> Labelled:
    """(tokens in all and of the first segment, label) of the pairs of an epoch of ours."""
    return lengths([pairs for _, pairs in pools(split, rules, epoch)])


def lengths(found: Sequence[PairSpans]) -> Labelled:
    """(tokens in all and of the first segment, label) of pairs."""
    first, second, labels = (
        np.concatenate([getattr(pairs, name) for pairs in found])
        for name in ("first_lengths", "second_lengths", "labels")
    )
    return np.stack([first + second, first], 1), labels


def pools(
    split: CorpusSplit, rules: PackingRules, epoch: int
) -> Iterator[tuple[list[int], PairSpans]]:
    """The blocks and the pairs of each pool of an epoch."""
    order = EpochOrder(split.sequence_counts(rules), 1, epoch)
    found = {tuple(order.pool(block)) for block in range(len(split.index.blocks))}
    for blocks in sorted(found):
        yield list(blocks), pairs_of(split, blocks, rules, epoch)


def pairs_of(
    split: CorpusSplit, blocks: Sequence[int], rules: PackingRules, epoch: int
) -> PairSpans:
    """The pairs of some blocks as one pool."""
    bounds, numbers = zip(*map(split.index.boundaries_of, blocks), strict=True)
    return pair_spans(Pool(bounds, numbers), rules, scalar_key(1, epoch, blocks[0]))


def documents(blocks: Iterable[Block]) -> Documents:
    """The documents of blocks; one that is cut between blocks is several."""
    return [
        part.tolist()
        for block in blocks
        for part in np.split(block.sentences, np.cumsum(block.documents, dtype=int)[:-1])
    ]


def original(texts: Documents, length: int, swap: bool, seed: int) -> Labelled:
    """Lengths and labels of BERT's algorithm; with `swap` of ALBERT's for sentence order.

    github.com/google-research/bert and /albert, create_instances_from_document, at their defaults
    (short_seq_prob 0.1; for ALBERT random_next_sentence false).
    """
    draw = random.Random(seed)
    rows = [
        row
        for number in range(len(texts))
        for row in _instances(texts, number, length - 3, draw, swap)
    ]
    first, second, labels = np.array(rows).T
    return np.stack([first + second, first], 1), labels


def _instances(
    texts: Documents, number: int, most: int, draw: random.Random, swap: bool
) -> Iterator[tuple[int, int, int]]:
    """(first, second, label) of each instance of one document."""
    text, at, chunk = texts[number], 0, list[int]()
    target = draw.randint(2, most) if draw.random() < SHORT else most
    while at < len(text):
        chunk.append(text[at])
        at += 1
        if at < len(text) and sum(chunk) < target:
            continue
        split = draw.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
        first, second, label = sum(chunk[:split]), sum(chunk[split:]), 0
        if len(chunk) == 1 or (not swap and draw.random() < 0.5):
            second, label = _random_next(texts, number, target - first, draw), 1
            at -= len(chunk) - split  # what was not used is read again
        elif swap and draw.random() < 0.5:
            first, second, label = second, first, 1
        chunk = []
        yield *_truncated(first, second, most), label


def _random_next(texts: Documents, number: int, target: int, draw: random.Random) -> int:
    """The length of a second segment out of another document, from a random sentence on."""
    other = next((n for n in (draw.randrange(len(texts)) for _ in range(10)) if n != number), 0)
    total = 0
    for sentence in texts[other][draw.randrange(len(texts[other])) :]:
        total += sentence
        if total >= target:
            break
    return total


def _truncated(first: int, second: int, most: int) -> tuple[int, int]:
    """The longer one gives a token, until there are `most`."""
    while first + second > most:
        first, second = (first - 1, second) if first > second else (first, second - 1)
    return first, second


def print_words(train: CorpusSplit, held_out: CorpusSplit, least: int) -> None:
    """How well shared words tell a next segment from one drawn from ever further away."""
    print("| negatives from | length | held-out pairs | told from words |\n|---|---|---|---|")
    for length in LENGTHS:
        rules = PackingRules("segment_pair", length)
        for name in ("the block", "the pool", "the split"):
            fit, judged = (
                repeat(partial(words, one, rules, name), least) for one in (train, held_out)
            )
            told = accuracy(fit, judged)
            print(f"| {name} | {length} | {len(judged[1]):,} | {told:.3f} |", flush=True)


def words(split: CorpusSplit, rules: PackingRules, reach: str, epoch: int) -> Labelled:
    """(likeness of the segments' words, tokens in all) and labels of the pairs of an epoch."""
    every = range(len(split.index.blocks))
    found = {
        "the block": lambda: [([n], pairs_of(split, [n], rules, epoch)) for n in every],
        "the pool": lambda: list(pools(split, rules, epoch)),
        "the split": lambda: [(list(every), pairs_of(split, every, rules, epoch))],
    }[reach]()
    counts = split.index.token_counts
    weights = np.log(counts.sum() / np.maximum(counts, 1)) ** 2
    weights[split.vocabulary.is_special] = 0.0
    parts = []
    for blocks, pairs in found:
        separator = split.vocabulary.sep
        text = np.concatenate([stream(split.read_block(n), separator) for n in blocks])
        parts.append((likenesses(text, pairs, weights), pairs))
    sizes, labels = lengths([pairs for _, pairs in parts])
    return np.stack([np.concatenate([one for one, _ in parts]), sizes[:, 0]], 1), labels


def likenesses(text: NDArray[Any], pairs: PairSpans, weights: NDArray[Any]) -> NDArray[Any]:
    """[pairs] the cosine between the sets of tokens of the two segments, weighted by rarity."""
    found = np.zeros(len(pairs.labels))
    spans = (pairs.first_starts, pairs.first_lengths, pairs.second_starts, pairs.second_lengths)
    for number, (one, one_length, other, other_length) in enumerate(zip(*spans, strict=True)):
        first, second = (
            np.unique(text[start : start + length])
            for start, length in ((one, one_length), (other, other_length))
        )
        shared = np.intersect1d(first, second, assume_unique=True)
        norm = np.sqrt(weights[first].sum() * weights[second].sum())
        found[number] = weights[shared].sum() / norm if norm else 0.0
    return found


if __name__ == "__main__":
    main()
