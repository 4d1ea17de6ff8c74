"""The curve of a FastBERT: accuracy, FLOPs and examples per second by the threshold `speed`.

    python benchmarks/early_leaving.py EXPORT FILE [--speeds 0,.1,.2,.3,.4,.5,.6,.7,.8,.9,1]
        [--column text=sentence] [--label label] [--rounds 3]

EXPORT is what `tandem finetune fastbert` has exported, and FILE a labelled file of its task. The
first row is the model without branches but the last, as `tandem predict` runs it without --speed.
FLOPs are those of the matrix products of each example's own tokens, padding not counted, in the
layers and branches that it has passed (`model.accounting`). Examples per second are of the passes
of `tandem predict` on encoded texts, with its batches, and so is the processor time of an example,
which alone has a meaning on a busy machine: the best of several rounds, in which the thresholds
take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from data_pipeline.task_files.contents import present
from data_pipeline.task_files.tables import read_table
from model import EncoderConfig
from model.accounting import flops_per_token, flops_to_leave
from trainer.device import own_device
from trainer.objectives.task import LABEL, TaskFile
from trainer.prediction.fine_tuned import FineTuned, Segments

Result = TypeVar("Result")
SPEEDS = ",".join(str(tenths / 10) for tenths in range(11))


@dataclass(frozen=True)
class Point:
    """The results of one threshold; a `speed` of None is the whole model."""

    speed: float | None
    accuracy: float
    layer: float  # mean over the examples
    flops: float  # mean over the examples
    seconds: float  # for all examples
    worked: float  # processor seconds for all examples


def main() -> None:
    """Print the curve as a table."""
    arguments = _arguments()
    tuned = FineTuned.open(Path(arguments.export), own_device())
    columns = {**tuned.facts.columns, LABEL: arguments.label}
    columns |= dict(word.split("=", 1) for word in arguments.column)
    sequences, labels = encoded(tuned, TaskFile(Path(arguments.file), columns))
    speeds = [None, *(float(word) for word in arguments.speeds.split(","))]
    points = curve(tuned, sequences, labels, speeds, arguments.rounds)
    print(f"{len(labels)} examples, {torch.get_num_threads()} threads, {own_device()}\n")
    print("\n".join(table(points, len(labels))))


def encoded(tuned: FineTuned, file: TaskFile) -> tuple[list[Segments], list[str]]:
    """The sequences and the labels of a file of examples."""
    fields = tuned.facts.fields
    rows = list(present(read_table(str(file.path), file.columns_of(*fields, LABEL))))
    texts = [([row[name] for name in fields], where) for where, row in rows]
    return [tuned.encoder.sequence(*text) for text in texts], [row[LABEL] for _, row in rows]


def curve(
    tuned: FineTuned,
    sequences: Sequence[Segments],
    labels: Sequence[str],
    speeds: Sequence[float | None],
    rounds: int,
) -> list[Point]:
    """A point for each of the `speeds`."""
    points: list[Point] = []
    for turn in range(rounds):
        for number, speed in enumerate(speeds):
            point = measured(tuned, sequences, labels, speed)
            if turn == 0:
                points.append(point)
            before = points[number]
            best = min(point.seconds, before.seconds), min(point.worked, before.worked)
            points[number] = replace(point, seconds=best[0], worked=best[1])
    return points


def measured(
    tuned: FineTuned, sequences: Sequence[Segments], labels: Sequence[str], speed: float | None
) -> Point:
    """One pass over all examples."""
    config, head = tuned.model.config, tuned.head
    assert isinstance(config, EncoderConfig)
    vocabulary = tuned.encoder.vocabulary
    lengths = [len(vocabulary.with_special(segments)[0]) for segments in sequences]
    if speed is None:
        outputs, seconds, worked = timed(lambda: tuned.outputs(sequences))
        layers = [config.layers] * len(labels)
        flops = [length * flops_per_token(config, length, 0.0) for length in lengths]
    else:
        early, seconds, worked = timed(lambda: tuned.early_outputs(sequences, speed))
        outputs, layers = [logits for logits, _ in early], [layer for _, layer in early]
        pairs = zip(layers, lengths, strict=True)
        flops = [float(flops_to_leave(config, head, *pair)) for pair in pairs]
    told = [head.labels[int(logits.argmax())] for logits in outputs]
    right = [a == b for a, b in zip(told, labels, strict=True)]
    mean = statistics.fmean
    return Point(speed, mean(right), mean(layers), mean(flops), seconds, worked)


def timed(run: Callable[[], Result]) -> tuple[Result, float, float]:
    """The result of `run`, and how long it took, by the clock and of the processors."""
    began, worked = time.perf_counter(), time.process_time()
    result = run()
    return result, time.perf_counter() - began, time.process_time() - worked


def table(points: Sequence[Point], examples: int) -> Iterator[str]:
    """The curve in Markdown; the first point is what the others are compared with."""
    yield "| speed | accuracy | mean layer | MFLOPs | times fewer | examples/s | CPU ms | times |"
    yield "|---|---|---|---|---|---|---|---|"
    first = points[0]
    for point in points:
        cells = (
            "none" if point.speed is None else f"{point.speed:.2f}",
            f"{point.accuracy:.4f}", f"{point.layer:.2f}", f"{point.flops / 1e6:.1f}",
            f"{first.flops / point.flops:.2f}", f"{examples / point.seconds:.0f}",
            f"{1000 * point.worked / examples:.2f}", f"{first.worked / point.worked:.2f}",
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export")
    parser.add_argument("file")
    parser.add_argument("--speeds", default=SPEEDS)
    parser.add_argument("--column", action="append", default=[], metavar="FIELD=COLUMN")
    parser.add_argument("--label", default=LABEL)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
