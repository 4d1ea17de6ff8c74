"""A larger model begins as a smaller one, repeated around its middle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import model
from model import EncoderConfig
from tests.distributed import run_distributed
from tests.trainer.jobs import run, tiny_job
from trainer.errors import TrainingError
from trainer.job_data.fit import require_inputs

SIZES = {"vocab_size": 600, "max_positions": 32, "heads": 2, "ffn_size": 24, "hidden_size": 16}
MODERN = {
    "positions": "rotary", "norm_placement": "pre", "feed_forward": "glu", "segment_types": 0,
    "pooler": "none",
}  # fmt: skip
LARGER = {"hidden_size": 32, "heads": 4, "ffn_size": 40, "layers": 5}


def by_loops(small: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """`small` in the middle, its pattern continued on each side, an element at a time."""
    top, left = (rows - len(small)) // 2, (columns - small.shape[1]) // 2
    found = torch.zeros(rows, columns)
    for row in range(rows):
        for column in range(columns):
            found[row, column] = small[(row - top) % len(small), (column - left) % small.shape[1]]
    return found


def test_tensors_repeat_around_the_middle_and_layers_spread():
    small = EncoderConfig(**SIZES, **MODERN, layers=2)
    large = EncoderConfig(**{**SIZES, **MODERN, **LARGER})
    assert not model.cannot_tile(large, small)
    state = model.build(small, seed=1).state_dict()
    tiled = model.tile(state, small, large, seed=2)
    model.build(large, seed=3).load_state_dict(tiled)
    query = "encoder.attention.{}.query.weight"
    for layer, origin in enumerate([0, 0, 1, 1, 1]):  # round(i * 2 / 5), and no layer 2
        expected = by_loops(state[query.format(origin)], 32, 32)
        assert torch.equal(tiled[query.format(layer)], expected)
    name = "encoder.feed_forward.0.stack.0.input.weight"  # two halves, each by itself
    halves = [by_loops(half, 40, 32) for half in state[name].chunk(2)]
    assert torch.equal(tiled[name], torch.cat(halves))
    assert torch.equal(tiled["encoder.attention.1.norm.weight"], torch.ones(32))  # 0 has none
    assert torch.equal(tiled["head.bias"], state["head.bias"])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"heads": 2}, "heads of one size: 16 here, 8 there"),
        ({"vocab_size": 601}, "needs an equal vocab_size: 601 here, 600 there"),
        ({"layers": 1}, "needs layers of 2 or more, not 1"),
        ({"sharing": "all"}, "is for models without shared layers"),
    ],
)
def test_what_cannot_be_tiled_is_said(changes, why):
    small = EncoderConfig(**SIZES, **MODERN, layers=2)
    large = EncoderConfig(**{**SIZES, **MODERN, **LARGER, **changes})
    assert why in model.cannot_tile(large, small)


def train(corpus: Path, runs: Path, words: list[str]) -> None:
    run(tiny_job(corpus, runs, *words))


def test_a_job_trains_a_tiled_model(corpus, finished, tmp_path):
    export = finished[0] / "exports" / "teacher"
    larger = f"{{base: {export}/model.yaml, hidden_size: 64, heads: 8, ffn_size: 96, layers: 6}}"
    words = ["students=null", "steps=2", f"teacher.init.tile={export}", f"teacher.model={larger}"]
    require_inputs(tiny_job(corpus, tmp_path, *words))
    run_distributed(train, 1, corpus, tmp_path, words)
    with pytest.raises(TrainingError, match=r"^teacher.init.tile: .*: needs ffn_size of 64 or"):
        require_inputs(tiny_job(corpus, tmp_path, *words, "name=no", "teacher.model.ffn_size=32"))
