"""Sizes and speeds of full-size models, beside what their papers say of them.

    OMP_NUM_THREADS=1 python benchmarks/published_shapes.py [--picture FILE.svg]
    OMP_NUM_THREADS=1 python benchmarks/published_shapes.py --models bert_base tinybert_6 [--train]

Without `--models`, every claim of CLAIMS. Otherwise these models are compared with the first of
them. Weights and tokens are random, since neither changes the work. Inference is what a fine-tuned
classifier runs: embeddings and all layers, without a masked-LM head. Training (`--train`) is
forward and backward of masked language modelling on 15% of the tokens, without dropout and without
the optimizer. Float32, no padding, one thread; the models take turns in one process, and processor
time counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import process_time

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import configs
from benchmarks.studies.claims import CLAIMS, Ratios, drawn
from benchmarks.studies.tables import markdown
from benchmarks.turns import median_seconds
from model import EncoderConfig, Model, build, describe, vocabulary_logits

MASKED_FRACTION = 0.15
TITLES = (
    "model", "parameters", "times fewer", "GFLOPs", "times fewer", "CPU ms", "times faster",
)  # fmt: skip

Work = Callable[[Model, torch.Tensor], object]


@dataclass(frozen=True)
class Measured:
    """One model: parameters, and matrix products and processor seconds of one example."""

    name: str
    parameters: int
    flops: float
    seconds: float

    def beside(self, other: Measured) -> Ratios:
        """How many times this model is smaller and faster than the other."""
        return Ratios(other.parameters / self.parameters, other.seconds / self.seconds)


def main() -> None:
    """Print a table for each model that others are compared with."""
    arguments = _arguments()
    torch.set_num_threads(1)
    print(f"{arguments.rows} x {arguments.length} tokens, median of {arguments.turns} turns\n")
    if arguments.models:
        _print(measure(arguments.models, arguments.train, arguments))
        return
    found = dict[str, Ratios]()
    for base in dict.fromkeys(claim.base for claim in CLAIMS):
        claims = [claim for claim in CLAIMS if claim.base == base]
        names = [base, *(claim.model for claim in claims)]
        first, *others = measure(names, claims[0].training, arguments)
        _print([first, *others])
        found |= {one.name: one.beside(first) for one in others}
    if arguments.picture:
        arguments.picture.write_text(drawn(found), encoding="utf-8")


def measure(names: Sequence[str], training: bool, arguments: argparse.Namespace) -> list[Measured]:
    """The models of these names, timed in turns."""
    shapes = {name: configs.load(name, EncoderConfig, "model") for name in names}
    work: Work = train if training else infer
    size = arguments.rows, arguments.length
    arms: dict[str, Callable[[], object]] = {
        name: partial(work, build(one, seed=1).eval(), ids(one, *size))
        for name, one in shapes.items()
    }
    seconds = median_seconds(arms, arguments.turns, process_time)
    return [
        Measured(
            name,
            describe(one).parameters,
            flops_of(one, arguments.length, training),
            seconds[name] / arguments.rows,
        )
        for name, one in shapes.items()
    ]


def infer(model: Model, input_ids: torch.Tensor) -> None:
    """The last hidden states [B, L, H] of the tokens [B, L]."""
    with torch.inference_mode():
        model.encode(input_ids)


def train(model: Model, input_ids: torch.Tensor) -> None:
    """Forward and backward of masked language modelling of the tokens [B, L]."""
    masked = torch.arange(0, input_ids.numel(), round(1 / MASKED_FRACTION))
    found = model.features(input_ids, masked_positions=masked).vocabulary_input
    assert found is not None, "a model without a masked-LM head"
    logits = vocabulary_logits(found, *model.output_projection())
    F.cross_entropy(logits, input_ids.flatten()[masked]).backward()
    model.zero_grad()


def ids(config: EncoderConfig, rows: int, length: int) -> torch.Tensor:
    """Random tokens, int64 [rows, length]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, config.vocab_size, (rows, length), generator=generator)


def flops_of(config: EncoderConfig, length: int, training: bool) -> float:
    """Matrix products of what is timed, for one example."""
    if training:
        return length * describe(config, length, MASKED_FRACTION).flops_per_token
    return length * describe(config, length, 0.0).flops_per_token_forward


def _print(models: Sequence[Measured]) -> None:
    """Markdown: a row for each model, compared with the first."""
    first = models[0]
    rows = [
        [
            one.name,
            f"{one.parameters:,}", f"{one.beside(first).smaller:.2f}",
            f"{one.flops / 1e9:.2f}", f"{first.flops / one.flops:.2f}",
            f"{1000 * one.seconds:.1f}", f"{one.beside(first).faster:.2f}",
        ]
        for one in models
    ]  # fmt: skip
    print(markdown(TITLES, rows) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", help="of configs/model; default: all claims")
    parser.add_argument("--train", action="store_true", help="time training of --models")
    parser.add_argument("--picture", type=Path, help="the SVG to draw of all claims")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--turns", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
