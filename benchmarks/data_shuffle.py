"""How well the order is shuffled, against a full shuffle of all sequences.

    python benchmarks/data_shuffle.py [--shards 200] [--blocks 64] [--sequences 1000] [--rows 256]

Each sample has a position in the corpus between 0 and 1, and neighbouring text is similar. Under a
full shuffle, the mean position of B samples has the variance 1/(12 B). The measure is the variance
of that mean in our order divided by this one, over spans of 1, 10, 100 and 1000 steps. At 1, a span
represents the corpus as well as under a full shuffle. A reader without shuffling gives up to B.
Only an index in memory is read.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.order import BatchSizes, EpochOrder, SequenceCounts, Slots


def places(counts: SequenceCounts, rows: int, steps: int) -> NDArray[Any]:
    """The position in the corpus of each sample in the first steps of an epoch, [steps, rows]."""
    order = EpochOrder(counts, seed=1, epoch=0)
    found = np.empty((steps, rows))
    for row in range(rows):
        step = 0
        while step < steps:
            _, position = Slots(BatchSizes.constant(rows), counts.total).locate(
                step, np.array([row])
            )
            span = order.span(int(position[0]))
            begin = int(position[0]) - span.first_position
            samples = span.first_sample + order.within_block(span)[begin:]
            count = min(len(samples), steps - step)
            found[step : step + count, row] = samples[:count] / counts.total
            step += count
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    blocks = options.shards * options.blocks
    counts = SequenceCounts(
        per_block=np.full(blocks, options.sequences, np.uint32),
        per_shard=np.full(options.shards, options.sequences * options.blocks),
        first_block=np.arange(options.shards + 1) * options.blocks,
    )
    steps = min(options.steps, counts.total // options.rows)
    ours = places(counts, options.rows, steps)
    full = np.random.default_rng(0).random((steps, options.rows))
    print("| steps | variance of the mean place, ours | full shuffle |\n|---|---|---|")
    for span in (1, 10, 100, 1000):
        print(f"| {span} | {ratio(ours, span):.2f} | {ratio(full, span):.2f} |")


def ratio(found: NDArray[Any], span: int) -> float:
    """Variance of the mean position over `span` steps, as a multiple of an independent draw's."""
    steps = len(found) // span * span
    means = found[:steps].reshape(-1, span * found.shape[1]).mean(1)
    return float(((means - 0.5) ** 2).mean() * 12 * span * found.shape[1])


if __name__ == "__main__":
    main()
