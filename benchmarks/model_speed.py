"""Training speed of a learner in the real trainer, side by side with `transformers`.

One masked-LM learner under its DeepSpeed engine (stage 0, one process) beside BertForMaskedLM with
its own loss and attention, both with what their trainers do by default: fused AdamW and gradients
clipped at norm 1. Micro-batches of random tokens, 15% masked, V = 30,522, L = 128, no padding, no
dropout; the same threads, batch and precision. They take turns, so that other work on the machine
affects all equally, each in a process of its own: on a CPU Tandem's keeps the memory that it frees,
which other processes do not by default. Time is CPU time with one thread, and wall-clock time with
more or on a GPU.

    python benchmarks/model_speed.py --size small --precision fp32 --threads 1

`tandem` is a student of hard or soft labels, or a teacher with ``masked_only``: its last layer
computes masked positions only. `whole last layer` is a teacher whose last hidden state students
may read.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

import data_pipeline
from data_pipeline import Batch, Target
from model import EncoderConfig
from trainer.learner_config import PRECISIONS, LearnerConfig
from trainer.learner_names import TEACHER
from trainer.learners.engine import join_process_group
from trainer.learners.learner import Learner, StepShape
from trainer.objectives import ObjectiveConfig
from trainer.step import train_step
from trainer.tasks.masked_language_modelling import MaskedLanguageModelling

SIZES = {"small": (256, 4, 4), "base": (768, 12, 12)}  # hidden size, layers, heads
V, L, MASKED = 30522, 128, 19

Step = Callable[[], object]
Build = Callable[[argparse.Namespace, Batch], Step]


def main() -> None:
    """Print tokens per second of everyone, and how many times `transformers`' that is."""
    arguments = _arguments()
    builds: dict[str, Build] = {"transformers": _theirs, "tandem": partial(_ours, masked_only=True)}
    if arguments.whole:
        builds["tandem, whole last layer"] = partial(_ours, masked_only=False)
    medians = take_turns(builds, arguments)
    for name, median in medians.items():
        speed = arguments.rows * L / median
        print(f"{name}: {speed:.0f} tokens/s, {medians['transformers'] / median:.2f}")


def take_turns(builds: dict[str, Build], arguments: argparse.Namespace) -> dict[str, float]:
    """The median seconds of each; the first turn, which allocates and initialises, is left out."""
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for name, build in builds.items():
        pipes[name], end = context.Pipe()
        context.Process(target=_time_steps, args=(build, arguments, end), daemon=True).start()
        end.close()  # so that a process that ends early ends the wait for it
    seconds: dict[str, list[float]] = {name: [] for name in builds}
    for turn in range(arguments.steps + 1):
        for name, pipe in pipes.items():
            pipe.send(None)
            took = pipe.recv()
            if turn:
                seconds[name].append(took)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _time_steps(build: Build, arguments: argparse.Namespace, pipe: Connection) -> None:
    """A step for each message, whose seconds are sent back."""
    torch.set_num_threads(arguments.threads)
    step, clock = build(arguments, _batch(arguments.rows)), _clock(arguments.threads)
    while True:
        pipe.recv()
        began = clock()
        step()
        pipe.send(clock() - began)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--whole", action="store_true", help="also with a whole last layer")
    return parser.parse_args()


def _join_alone() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    join_process_group()


def _clock(threads: int) -> Callable[[], float]:
    def wall() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    return time.process_time if threads == 1 and not torch.cuda.is_available() else wall


def _batch(rows: int) -> Batch:
    generator = np.random.default_rng(0)
    ids = generator.integers(1, V, (rows, L))
    chosen = np.stack([np.sort(generator.permutation(L)[:MASKED]) for _ in range(rows)])
    return Batch(
        input_ids=ids,
        segment_ids=np.zeros_like(ids),
        attention_mask=np.ones_like(ids),
        targets={data_pipeline.MASKED: Target(np.take_along_axis(ids, chosen, axis=1), chosen)},
        sample_ids=np.arange(rows),
        epochs=np.zeros(rows, np.int64),
    )


def _theirs(arguments: argparse.Namespace, batch: Batch) -> Step:
    hidden, layers, heads = SIZES[arguments.size]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_bf16 = arguments.precision == "bf16"
    config = BertConfig(
        vocab_size=V, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * hidden, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    trained = BertForMaskedLM(config).train().to(device)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=True)
    ids, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels())

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            loss: Tensor = trained(ids.to(device), labels=labels.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def _ours(arguments: argparse.Namespace, batch: Batch, masked_only: bool) -> Step:
    _join_alone()
    hidden, layers, heads = SIZES[arguments.size]
    encoder = EncoderConfig(
        vocab_size=V, hidden_size=hidden, layers=layers, heads=heads, ffn_size=4 * hidden,
        pooler="none",
    )  # fmt: skip
    config = LearnerConfig(
        model=encoder,
        objective=ObjectiveConfig(mlm=MaskedLanguageModelling()),
        precision=arguments.precision,
        masked_only=masked_only,
    )
    step_shape = StepShape(steps=1000, seed=0, micro_batch=len(batch.input_ids), accumulation=1)
    learner = Learner(TEACHER, config, encoder, step_shape)
    at = iter(range(1000))
    return lambda: train_step(learner, [], batch, next(at))


if __name__ == "__main__":
    main()
