"""Training speed of a learner in the real trainer, side by side with `transformers`.

One masked-LM learner under its DeepSpeed engine (stage 0, one process) beside the class of
`transformers` for its model (by default BertForMaskedLM), with its own loss and attention, both
with what their trainers do by default: fused AdamW and gradients clipped at norm 1. Micro-batches
of random tokens, 15% masked, no padding, no dropout; the same threads, batch and
precision. ModernBertForMaskedLM predicts masked tokens only, as its authors train it. They
take turns, so that other work on the machine affects all equally, each in a process of its own: on
a CPU Tandem's keeps the memory that it frees, which other processes do not by default. Time is CPU
time with one thread, and wall-clock time with more or on a GPU. On a GPU the class is compiled.

    python benchmarks/model_speed.py --model demo_teacher --precision fp32 --threads 1

`tandem` is a student of hard or soft labels, or a teacher with ``masked_only``: its last layer
computes masked positions only. `whole last layer` is a teacher whose last hidden state students
may read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import configs
from benchmarks.learners import (
    LENGTH,
    Step,
    join_alone,
    masked_batch,
    our_step,
    teacher,
    transformers_step,
)
from benchmarks.turns import clock_for, medians, seconds_of, take_turns
from data_pipeline import Batch
from model import EncoderConfig
from trainer.learner_config import PRECISIONS

SMALL = ["hidden_size=256", "layers=4", "heads=4", "ffn_size=1024"]

Build = Callable[[argparse.Namespace, Batch], Step]
_step: Callable[[], float]  # of a process that takes steps


def main() -> None:
    """Print tokens per second of everyone, and how many times `transformers`' that is."""
    arguments = _arguments()
    builds: dict[str, Build] = {"transformers": _theirs, "tandem": partial(_ours, masked_only=True)}
    if arguments.whole:
        builds["tandem, whole last layer"] = partial(_ours, masked_only=False)
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(process_of(build, arguments))
            for name, build in builds.items()
        }

        def step_of(process: ProcessPoolExecutor) -> float:
            return process.submit(_seconds_of_step).result()

        arms = {name: partial(step_of, process) for name, process in processes.items()}
        seconds = medians(take_turns(arms, arguments.steps))
    for name, median in seconds.items():
        speed = arguments.rows * arguments.length / median
        print(f"{name}: {speed:.0f} tokens/s, {seconds['transformers'] / median:.2f}")


def process_of(build: Build, arguments: argparse.Namespace) -> ProcessPoolExecutor:
    """A process of its own that takes steps, as `_seconds_of_step`."""
    return ProcessPoolExecutor(1, get_context("spawn"), _prepare, (build, arguments))


def _prepare(build: Build, arguments: argparse.Namespace) -> None:
    """Build the step that this process takes."""
    global _step
    torch.set_num_threads(arguments.threads)
    batch = masked_batch(arguments.rows, arguments.length, _encoder(arguments).vocab_size)
    _step = partial(seconds_of, build(arguments, batch), clock_for(arguments.threads))


def _seconds_of_step() -> float:
    """The seconds of a step in this process."""
    return _step()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bert_base", help="of configs/model")
    parser.add_argument("--small", action="store_true", help="4 layers, H = 256")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--whole", action="store_true", help="also with a whole last layer")
    return parser.parse_args()


def _encoder(arguments: argparse.Namespace) -> EncoderConfig:
    changes = [*(SMALL if arguments.small else []), "pooler=none"]
    return configs.load(arguments.model, EncoderConfig, "model", changes).with_dropout(0.0)


def _theirs(arguments: argparse.Namespace, batch: Batch) -> Step:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return transformers_step(_encoder(arguments), batch, device, arguments.precision)


def _ours(arguments: argparse.Namespace, batch: Batch, masked_only: bool) -> Step:
    join_alone()
    settings = {"precision": arguments.precision, "masked_only": masked_only}
    return our_step(teacher(_encoder(arguments), arguments.rows, **settings), batch)


if __name__ == "__main__":
    main()
