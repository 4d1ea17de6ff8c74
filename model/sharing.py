"""Which layers share which weights (ALBERT, arXiv 1909.11942)."""

from __future__ import annotations

from model.config import EncoderConfig


def attention_units(config: EncoderConfig) -> list[int]:
    """The index of the attention weights that each layer uses: [layers]."""
    return _units(config, config.sharing in ("all", "attention"))


def feed_forward_units(config: EncoderConfig) -> list[int]:
    """The index of the feed-forward weights that each layer uses: [layers]."""
    return _units(config, config.sharing in ("all", "ffn"))


def _units(config: EncoderConfig, shared: bool) -> list[int]:
    if not shared:
        return list(range(config.layers))
    return [i * config.groups // config.layers for i in range(config.layers)]
