"""Sizes and speeds of full-size models, beside what their papers say of them.

    OMP_NUM_THREADS=1 python benchmarks/published_shapes.py [--models bert_base tinybert_4]
    OMP_NUM_THREADS=1 python benchmarks/published_shapes.py --train --models bert_large albert_large

The first of the models is what the others are compared with. Weights and tokens are random, since
neither changes the work. Inference is what a fine-tuned classifier runs: embeddings and all layers,
without a masked-LM head. With `--train` it is forward and backward of masked language modelling on
15% of the tokens, without dropout and without the optimizer. Float32, no padding, one thread; the
models take turns in one process, and processor time counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import process_time

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import configs
from benchmarks.cotraining_speed import take_turns
from model import EncoderConfig, Model, build, describe

COMPRESSED = ["bert_base", "distilbert", "tinybert_4", "mobilebert"]
MASKED_FRACTION = 0.15
TITLES = (
    "model", "parameters", "times fewer", "GFLOPs", "times fewer", "CPU ms", "times faster",
)  # fmt: skip

Work = Callable[[Model, torch.Tensor], object]


def main() -> None:
    """Print a row for each model."""
    arguments = _arguments()
    torch.set_num_threads(1)
    shapes = {name: configs.load(name, EncoderConfig, "model") for name in arguments.models}
    work: Work = train if arguments.train else infer
    size = arguments.rows, arguments.length
    arms: dict[str, Callable[[], object]] = {
        name: partial(work, build(one, seed=1).eval(), ids(one, *size))
        for name, one in shapes.items()
    }
    seconds = take_turns(arms, arguments.turns, process_time)
    per_example = {name: one / arguments.rows for name, one in seconds.items()}
    print(f"{arguments.rows} x {arguments.length} tokens, median of {arguments.turns} turns\n")
    print("\n".join(table(shapes, per_example, arguments.length, arguments.train)))


def infer(model: Model, input_ids: torch.Tensor) -> None:
    """The last hidden states [B, L, H] of the tokens [B, L]."""
    with torch.inference_mode():
        model.encode(input_ids)


def train(model: Model, input_ids: torch.Tensor) -> None:
    """Forward and backward of masked language modelling of the tokens [B, L]."""
    masked = torch.arange(0, input_ids.numel(), round(1 / MASKED_FRACTION))
    found = model.features(input_ids, masked_positions=masked).vocabulary_input
    assert found is not None, "a model without a masked-LM head"
    logits = F.linear(found, *model.output_projection())
    F.cross_entropy(logits, input_ids.flatten()[masked]).backward()
    model.zero_grad()


def ids(config: EncoderConfig, rows: int, length: int) -> torch.Tensor:
    """Random tokens, int64 [rows, length]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, config.vocab_size, (rows, length), generator=generator)


def table(
    shapes: Mapping[str, EncoderConfig],
    seconds: Mapping[str, float],
    length: int,
    is_training: bool,
) -> Iterator[str]:
    """A row of Markdown for each model, from its seconds per example."""
    yield f"| {' | '.join(TITLES)} |"
    yield "|---" * len(TITLES) + "|"
    parameters = {name: describe(one).parameters for name, one in shapes.items()}
    flops = {name: flops_of(one, length, is_training) for name, one in shapes.items()}
    first = next(iter(shapes))
    for name in shapes:
        cells = (
            name,
            f"{parameters[name]:,}", f"{parameters[first] / parameters[name]:.2f}",
            f"{flops[name] / 1e9:.2f}", f"{flops[first] / flops[name]:.2f}",
            f"{1000 * seconds[name]:.1f}", f"{seconds[first] / seconds[name]:.2f}",
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def flops_of(config: EncoderConfig, length: int, is_training: bool) -> float:
    """Matrix products of what is timed, for one example."""
    if is_training:
        return length * describe(config, length, MASKED_FRACTION).flops_per_token
    return length * describe(config, length, 0.0).flops_per_token_forward


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=COMPRESSED, help="of configs/model")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--turns", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
