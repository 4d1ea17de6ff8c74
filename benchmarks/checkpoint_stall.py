"""How long training waits for a checkpoint: asynchronous against synchronous saves.

    python benchmarks/checkpoint_stall.py [--parameters 50] [--ranks 2] [--stages 0 1 2 3]

A stack of linear layers with this many million parameters is trained with AdamW in fp32 on gloo
ranks of this machine, one thread each. For each ZeRO stage, training waits for some saves and
continues during others. The best time of each kind on the slowest rank is compared, because other
work on the machine disturbs the best least. The first save, which allocates the copy, is shown
separately. A stall is the time of the call `save` plus the extra time of the next optimizer step,
which waits for the copy that is made during the forward and backward pass.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed import run_distributed
from trainer.checkpoint.folder import Retention
from trainer.checkpoint.writer import CheckpointWriter

WIDTH = 1024


def measure(parameters: int, stage: int, saves: int, folder: str) -> dict[str, float]:
    """This rank's times in seconds and sizes in bytes."""
    engine = start(parameters, stage)
    step(engine)
    writer = CheckpointWriter(Path(folder) / f"stage-{stage}", Retention(last=1))
    save: dict[str, Any] = {"learners": {"teacher": engine}, "trainer_state": {}}
    update = min(updated(engine) for _ in range(saves))
    first, _ = stalled(writer, engine, 0, save, update)
    synchronous = [
        timed(partial(writer.save, 1 + number, wait=True, **save)) for number in range(saves)
    ]
    stalls, meanwhile = [], []
    for number in range(saves):
        stall, seconds = stalled(writer, engine, 100 + number, save, update)
        stalls.append(stall)
        meanwhile.append(seconds)
    alone = [timed(lambda: step(engine)) for _ in range(saves)]
    return {
        "first": first,
        "synchronous": min(synchronous),
        "stall": min(stalls),
        "step alone": min(alone),
        "step meanwhile": min(meanwhile),
        "copy": sum(buffer.memory.numel() for buffer in writer._buffers.values()),
    }


def start(parameters: int, stage: int) -> Any:
    """An engine with about this many million parameters."""
    import deepspeed

    layers = max(1, round(parameters * 1e6 / (WIDTH * WIDTH + WIDTH)))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000_000},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def stalled(
    writer: Any, engine: Any, number: int, save: dict[str, Any], update: float
) -> tuple[float, float]:
    """How long training waits for a save, and how long the concurrent step takes beyond that wait.

    `update` is the time of the optimizer's step alone.
    """
    asking = timed(lambda: writer.save(number, **save))
    passes = timed(lambda: backward(engine))
    waiting = max(0.0, timed(engine.step) - update)
    writer.wait()
    return asking + waiting, passes + update


def updated(engine: Any) -> float:
    """The time of the optimizer's step while no checkpoint is written."""
    backward(engine)
    return timed(engine.step)


def step(engine: Any) -> None:
    """Take one optimizer step on noise."""
    backward(engine)
    engine.step()


def backward(engine: Any) -> None:
    """Run one forward and backward pass."""
    engine.backward(engine(torch.randn(32, WIDTH)).square().mean())


def timed(action: Any) -> float:
    """The seconds that an action takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    """Print one line of a Markdown table for each stage."""
    # The ranks are forks of another program, which knows this module by its name.
    measured = importlib.import_module("benchmarks.checkpoint_stall").measure
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=50, help="millions")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--saves", type=int, default=5)
    arguments = parser.parse_args()
    columns = "stage", "synchronous", "stall", "ratio", "first stall", "step", "copy per rank"
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for stage in arguments.stages:
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_distributed(
                measured, arguments.ranks, arguments.parameters, stage, arguments.saves, folder
            )
        worst = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        print(
            f"| {stage} | {worst['synchronous']:.2f} s | {worst['stall']:.3f} s "
            f"| {worst['stall'] / worst['synchronous']:.1%} "
            f"| {worst['first']:.2f} s "
            f"| {worst['step alone']:.2f} s, while writing {worst['step meanwhile']:.2f} s "
            f"| {worst['copy'] / 1e6:.0f} MB |"
        )


if __name__ == "__main__":
    main()
