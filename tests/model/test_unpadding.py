"""Layers on the real tokens of padded rows alone, against `transformers` on all positions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from model import Capture, Features, MaskedLanguageModel, Padded
from model.documents import RealTokens
from model.precision import kernels_of
from tests.distributed import run_distributed
from tests.model.test_architectures import assert_close, assert_gradients_equal, inputs, pair
from tests.trainer import tiny

SHAPES = [
    "bert odd", "roberta", "albert groups", "mobilebert", "modernbert", "eurobert", "nomic bert",
    "deberta",
]  # fmt: skip
LENGTHS = torch.tensor([8, 3, 0, 5])


@pytest.mark.parametrize("case", SHAPES)
def test_tokens_have_the_states_and_gradients_of_padded_rows(case: str) -> None:
    theirs, ours = pair(case)
    theirs = copy.deepcopy(theirs).double()
    ids, segments, mask = inputs(theirs, 23, padded=True)
    assert mask is not None
    extra = {} if segments is None else {"token_type_ids": segments}
    expected = theirs(ids, attention_mask=mask, output_hidden_states=True, **extra).hidden_states
    capture = Capture(tuple(range(len(expected))), last_hidden_state=True)
    padded = Padded(mask.sum(1), int(mask.sum()))
    states = ours.features(ids, segments, padded, capture=capture).hidden_states
    real = mask.bool()
    size = int(mask.sum()), expected[-1].shape[-1]
    direction = torch.randn(size, generator=torch.Generator().manual_seed(1))
    for number, mine in states.items():
        assert_close(mine[real], expected[number][real].float())
        assert not mine[~real].any()  # no layer computed these
    for last in (expected[-1], states[len(expected) - 1]):
        (last[real] * direction).sum().backward()
    assert_gradients_equal(ours, theirs)


def features(model: MaskedLanguageModel, capture: Capture, mask: Padded | Tensor) -> Features:
    """At some masked positions, of which the last is padding."""
    ids = torch.randint(5, 90, (4, 8), generator=torch.manual_seed(0))
    return model.features(ids, None, mask, torch.tensor([7, 0, 9, 28, 31]), capture)


@pytest.mark.parametrize("capture", [Capture(), Capture((2,), (1, 4), True, True, True)])
def test_positions_are_those_of_padded_rows(capture: Capture) -> None:
    model = MaskedLanguageModel(tiny.encoder()).eval()
    rows = []
    model.encoder.feed_forward[0].register_forward_hook(
        lambda module, given, y: rows.append(tuple(given[0].shape[:2]))
    )
    unpadded = features(model, capture, Padded(LENGTHS, 16))
    padded = features(model, capture, LENGTHS)
    assert rows == [(1, 16), (4, 8)]
    torch.testing.assert_close(unpadded.vocabulary_input[:-1], padded.vocabulary_input[:-1])
    assert unpadded.vocabulary_input.isfinite().all()
    real = torch.arange(8) < LENGTHS[:, None]
    for number, qkv in padded.attention.items():
        for mine, expected in zip(unpadded.attention[number], qkv, strict=True):
            torch.testing.assert_close(mine.transpose(1, 2)[real], expected.transpose(1, 2)[real])
    if capture.all_positions:
        mine, expected = unpadded.all_positions, padded.all_positions
        torch.testing.assert_close(mine[real.flatten()], expected[real.flatten()])


def test_a_little_padding_stays() -> None:
    states, lengths = torch.empty(4, 10, 32), torch.tensor([10, 10, 10, 9])
    assert RealTokens.where_it_pays(Padded(lengths, 39), states, copies=True) is None
    fewer = Padded(lengths - 1, 35)
    assert RealTokens.where_it_pays(fewer, states, copies=True) is not None
    with kernels_of("cuda"):  # copies take longer there than the products of 5 tokens
        assert RealTokens.where_it_pays(fewer, states, copies=True) is None
        assert RealTokens.where_it_pays(fewer, states, copies=False) is not None


def compilations() -> list[int]:
    """How many graphs there are after batches with ever other numbers of tokens."""
    model = MaskedLanguageModel(tiny.encoder(layers=2))
    model.compile_layers(backend="eager", fullgraph=True)
    counts = []
    for last in range(1, 6):
        lengths = torch.tensor([8, 3, 7, last])
        mask = Padded(lengths, int(lengths.sum()))
        model.features(torch.ones(4, 8, dtype=torch.int64), None, mask)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return counts


@pytest.mark.slow
def test_any_number_of_tokens_shares_a_compilation() -> None:
    counts = run_distributed(compilations, 1)[0]
    assert counts == [counts[0]] * len(counts)
