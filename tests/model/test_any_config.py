"""Every configuration of an encoder that is accepted makes a model that runs and can be stored."""

from __future__ import annotations

import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from configs import ConfigError
from configs.rules import OneOf
from configs.typed import build as build_config
from model import EncoderConfig, build, from_pretrained, save_pretrained
from model.accounting import describe

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "layers": 2,
    "heads": 2,
    "ffn_size": 32,
    "max_positions": 40,
}
SIZES: dict[str, list[Any]] = {
    "hidden_size": [16],
    "layers": [1, 3],
    "heads": [1, 4],
    "kv_heads": [1, 2],
    "embedding_size": [8, 16, 48],
    "bottleneck_size": [8, 16],
    "feed_forwards": [2],
    "local_window": [4],
    "global_every": [2],
    "groups": [2],
    "position_buckets": [2, 7],
}


def choices() -> dict[str, list[Any]]:
    """The values to try, by key: those of the sizes above, and all that a key's rule names."""
    tried = dict(SIZES)
    hints = get_type_hints(EncoderConfig, include_extras=True)
    for name in (field.name for field in fields(EncoderConfig)):
        hint, *notes = get_args(hints[name]) or [hints[name]]
        named = [list(note.choices) for note in notes if isinstance(note, OneOf)]
        if hint is bool:
            tried[name] = [True, False]
        elif named and get_origin(hint) is not list:
            (tried[name],) = named
    return tried


KEYS = choices()


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    keys = draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=10, unique=True))
    return SMALL | {key: draw(st.sampled_from(KEYS[key])) for key in keys}


@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
@given(trees())
@example(SMALL | {"embedding_size": 48, "embedding_projection": "word"})
def test_a_configuration_that_is_accepted_runs_and_is_stored(tree: dict[str, Any]) -> None:
    try:
        config = build_config(tree, EncoderConfig)
    except ConfigError:
        assume(False)
    model = build(config, seed=0)
    ids = torch.arange(5, 29).view(2, 12)
    mask = (torch.arange(12) < torch.tensor([[12], [7]])).long()
    logits = model(ids, None, mask).logits
    if logits is not None:
        logits.logsumexp(-1).sum().backward()
    size = describe(config, 12)
    assert size.parameters + size.head_parameters == sum(p.numel() for p in model.parameters())
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save_pretrained(model.eval(), Path(folder))
        outputs = [
            stored(ids, None, mask).logits for stored in (model, from_pretrained(folder).eval())
        ]
    if logits is not None:
        first, second = (output[mask.bool()] for output in outputs)
        torch.testing.assert_close(first, second)
