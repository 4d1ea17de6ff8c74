"""The patterns of made-up attention maps, and the maps of models against `transformers`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from data_pipeline import Batch
from model import build, from_pretrained, save_pretrained
from tests.trainer import tiny
from trainer.analysis.maps import (
    KEY_SETS,
    PATTERNS,
    classify,
    excess,
    head_patterns,
    key_sets,
    masses,
    uniform_masses,
)
from trainer.batches import to_micro_batches
from trainer.objectives.terms import attention as relations

LENGTH, SECOND = 24, 13  # where the second segment begins
DELIMITERS = [0, SECOND - 1, LENGTH - 1]  # [CLS], [SEP], [SEP]


def told(maps: Tensor, segments: Tensor | None = None, window: int = 0) -> list[str]:
    """The pattern of each of the maps [A, L, L] of one sequence."""
    if segments is None:
        segments = (torch.arange(LENGTH) >= SECOND).long()
    position = torch.arange(LENGTH)
    near = (position[:, None] - position).abs() <= (window // 2 if window else LENGTH)
    delimiters = torch.zeros(1, LENGTH, dtype=torch.bool)
    delimiters[0, DELIMITERS] = True
    pairs = near[None]
    sets = key_sets(delimiters, segments[None], pairs, slice(0, LENGTH))
    found = masses(maps[None], sets) / LENGTH
    uniform = uniform_masses(sets, pairs) / LENGTH
    return [PATTERNS[number] for number in classify(excess(found, uniform))[0].tolist()]


def rows(*places: list[int]) -> Tensor:
    """A map in which query i attends to places[i] alike."""
    weights = torch.zeros(LENGTH, LENGTH)
    for query, keys in enumerate(places):
        weights[query, keys] = 1 / len(keys)
    return weights


VERTICAL = rows(*([DELIMITERS[one % 3]] for one in range(LENGTH)))
DIAGONAL = rows(*([max(one - 1, 0)] for one in range(LENGTH)))  # the previous token
OWN = [list(range(SECOND)), list(range(SECOND, LENGTH))]
BLOCK = rows(*(OWN[one >= SECOND] for one in range(LENGTH)))
UNIFORM = torch.full((LENGTH, LENGTH), 1 / LENGTH)
FAR = rows(*([(one + 9) % LENGTH] for one in range(LENGTH)))
OTHER = rows(*(OWN[one < SECOND] for one in range(LENGTH)))


def test_pure_maps_have_the_pattern_that_they_were_made_with() -> None:
    maps = torch.stack([VERTICAL, DIAGONAL, (VERTICAL + DIAGONAL) / 2, BLOCK, UNIFORM, FAR, OTHER])
    expected = [*PATTERNS, "heterogeneous", "heterogeneous"]
    assert told(maps) == expected


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (0.75 * VERTICAL + 0.25 * UNIFORM, "vertical"),
        (0.45 * VERTICAL + 0.55 * UNIFORM, "heterogeneous"),  # an excess of 0.45
        (0.55 * DIAGONAL + 0.45 * UNIFORM, "diagonal"),
        (0.7 * VERTICAL + 0.2 * DIAGONAL + 0.1 * UNIFORM, "vertical"),
        (0.2 * VERTICAL + 0.7 * DIAGONAL + 0.1 * UNIFORM, "diagonal"),
        (0.3 * VERTICAL + 0.5 * DIAGONAL + 0.2 * UNIFORM, "vertical+diagonal"),
        (0.6 * BLOCK + 0.4 * UNIFORM, "block"),
        (0.4 * BLOCK + 0.6 * UNIFORM, "heterogeneous"),
        (0.6 * DIAGONAL + 0.4 * BLOCK, "diagonal"),  # also within its segment, but nearer
    ],
)
def test_mixed_maps(weights: Tensor, expected: str) -> None:
    assert told(weights[None]) == [expected]


def test_one_segment_is_no_block_and_a_window_has_a_uniform_of_its_own() -> None:
    one = torch.zeros(LENGTH, dtype=torch.int64)
    assert told(BLOCK[None], segments=one) == ["heterogeneous"]
    position = torch.arange(LENGTH)
    near = ((position[:, None] - position).abs() <= 1).float()
    near /= near.sum(dim=-1, keepdim=True)
    assert told(near[None]) == ["diagonal"]
    assert told(near[None], window=2) == ["heterogeneous"]  # all that a layer of window 2 can do


def test_a_long_segment_is_no_block_by_rounding() -> None:
    length = 500
    pairs = torch.ones(1, length, length, dtype=torch.bool)
    none, one = torch.zeros(1, length, dtype=torch.bool), torch.zeros(1, length)
    sets = key_sets(none, one, pairs, slice(0, length))
    weights = torch.randn(1, 3, length, length).softmax(dim=-1)
    found = excess(masses(weights, sets) / length, uniform_masses(sets, pairs) / length)
    assert not found[3].any()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    config = tiny.encoder(layers=2, max_positions=LENGTH, initializer_range=0.6)
    save_pretrained(build(config, seed=2), folder)
    return folder


def pairs_of_texts(lengths: list[int]) -> Batch:
    ids = np.random.default_rng(0).integers(5, tiny.VOCABULARY, (len(lengths), LENGTH))
    mask = (np.arange(LENGTH) < np.array(lengths)[:, None]).astype(np.int64)
    second = (np.arange(LENGTH) >= LENGTH // 3) * mask
    numbers = np.arange(len(lengths))
    return Batch(ids * mask, second, mask, {}, numbers, numbers)


@pytest.mark.parametrize("score_bytes", [relations.SCORE_BYTES, 4 * 4 * LENGTH * 5])
def test_blocks_of_a_model_are_as_the_whole_maps_of_transformers(
    bert: Path, monkeypatch: pytest.MonkeyPatch, score_bytes: int
) -> None:
    """In `transformers`' own maps, by plain loops over queries."""
    monkeypatch.setattr(relations, "SCORE_BYTES", score_bytes)
    batch, delimiters = pairs_of_texts([LENGTH, 17, 9]), np.arange(tiny.VOCABULARY) % 7 == 0
    theirs = AutoModel.from_pretrained(bert, attn_implementation="eager").eval()
    with torch.no_grad():
        maps = theirs(
            input_ids=torch.from_numpy(batch.input_ids),
            token_type_ids=torch.from_numpy(batch.segment_ids),
            attention_mask=torch.from_numpy(batch.attention_mask),
            output_attentions=True,
        ).attentions
    shares, sums = np.zeros((2, 4, len(PATTERNS))), np.zeros((2, 4, len(KEY_SETS)))
    for layer, of_layer in enumerate(maps):
        for row, of_row in enumerate(of_layer.double().numpy()):
            for head, weights in enumerate(of_row):
                found = by_loops(weights, batch, row, delimiters)
                shares[layer, head, int(classify(torch.from_numpy(found)[:, None])[0])] += 1 / 3
                sums[layer, head] += found / 3
    micro = to_micro_batches(batch, 2, torch.device("cpu"))
    ours = head_patterns(from_pretrained(bert), micro, torch.from_numpy(delimiters))
    np.testing.assert_allclose(ours.excess.numpy(), sums, atol=1e-5)
    np.testing.assert_allclose(ours.shares.numpy(), shares, atol=1e-12)
    assert ours.sequences == 3
    assert (shares.sum(axis=(0, 1)) > 0).sum() > 1


def by_loops(weights: np.ndarray, batch: Batch, row: int, delimiters: np.ndarray) -> np.ndarray:
    """The excess of each set of keys in a map, [sets]."""
    length = int(batch.attention_mask[row].sum())
    ids, segments = batch.input_ids[row], batch.segment_ids[row]
    mass, uniform = np.zeros(len(KEY_SETS)), np.zeros(len(KEY_SETS))
    for query in range(length):
        for key in range(length):
            vertical, diagonal = delimiters[ids[key]], abs(query - key) <= 1
            own = segments[query] == segments[key]
            inside = np.array([vertical, diagonal, vertical or diagonal, own])
            mass += inside * weights[query, key] / length
            uniform += inside / length / length
    return (mass - uniform) / (1 - uniform)
