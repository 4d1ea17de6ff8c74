"""ModernBERT (arXiv 2412.13663): rotary positions, gated units, pre-norm, local attention."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from model.config import EncoderConfig
from model.errors import ModelError
from model.hugging_face import family
from model.hugging_face.family import ATTENTION, STACK, Family, Rules, refuse, require
from model.hugging_face.task_heads import PROBLEMS, linear
from model.task_head_config import CHOICE, SPAN, TAGGING

_FULL, _SLIDING = "full_attention", "sliding_attention"
_FUSED, _PARTS = ".attn.Wqkv.", (".attn.query.", ".attn.key.", ".attn.value.")
_HEADS = {
    **dict.fromkeys(
        (*PROBLEMS, CHOICE), linear("classifier", "first", chooses_pooling=True, norm="head")
    ),
    **dict.fromkeys((TAGGING, SPAN), linear("classifier", norm="head")),
}


_KEYS: family.Keys = {
    "vocab_size": ("vocab_size", 50368),
    "hidden_size": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 22),
    "heads": ("num_attention_heads", 12),
    "ffn_size": ("intermediate_size", 1152),
    "max_positions": ("max_position_embeddings", 8192),
    "pad_token_id": ("pad_token_id", 50283),
    "norm_eps": ("norm_eps", 1e-5),
    "norm_bias": ("norm_bias", False),
    "activation": ("hidden_activation", "gelu"),
    "attention_bias": ("attention_bias", False),
    "ffn_bias": ("mlp_bias", False),
    "head_activation": ("classifier_activation", "gelu"),
    "head_bias": ("classifier_bias", False),
    "decoder_bias": ("decoder_bias", True),
    "initializer_range": ("initializer_range", 0.02),
}


def _read(theirs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    refuse(theirs, {"tie_word_embeddings": (True,), "position_embedding_type": ("absolute",)})
    read = family.read_keys(theirs, _KEYS)
    global_theta, local_theta = _read_thetas(theirs)
    return read | {
        "segment_types": 0,
        "positions": "rotary",
        "norm_placement": "pre",
        "feed_forward": "glu",
        "local_window": theirs.get("local_attention", 128),
        "global_every": _read_global_every(theirs, read["layers"]),
        "global_rope_theta": global_theta,
        "local_rope_theta": local_theta,
        "pooler": "none",
        "dropout": theirs.get("mlp_dropout", 0.0),
        "attention_dropout": theirs.get("attention_dropout", 0.0),
        "initializer": "scaled_truncated_normal",
    }


def _read_global_every(theirs: Mapping[str, Any], layers: int) -> int:
    if theirs.get("layer_types") is None:
        return int(theirs.get("global_attn_every_n_layers", 3))
    kinds = list(theirs["layer_types"])
    for every in range(1, layers + 1):
        if kinds == _layer_types(layers, every):
            return every
    raise ModelError("layer_types: only every n-th layer, from the first, may attend globally")


def _read_thetas(theirs: Mapping[str, Any]) -> tuple[float, float]:
    """The bases of the rotary angles, (global, local), from the new or the old keys."""
    new = theirs.get("rope_parameters") or {}
    full, sliding = new.get(_FULL) or {}, new.get(_SLIDING) or {}
    family.refuse_scaled_rope(theirs, full, sliding)
    full_theta = full.get("rope_theta", theirs.get("global_rope_theta", 160000.0))
    sliding_theta = sliding.get("rope_theta", theirs.get("local_rope_theta", 10000.0))
    return float(full_theta), float(full_theta if sliding_theta is None else sliding_theta)


def _layer_types(layers: int, every: int) -> list[str]:
    return [_SLIDING if i % every else _FULL for i in range(layers)]


def _write(config: EncoderConfig) -> dict[str, Any]:
    require(config, "modernbert", positions="rotary", embedding_projection="none", trigram=False,
            segment_types=0, embedding_norm=True, norm="layer_norm", fixed_norm_eps=0.0,
            norm_placement="pre", feed_forward="glu", feed_forwards=1, bottleneck_size=0,
            sharing="none", pooler="none")  # fmt: skip
    return {
        "architectures": ["ModernBertForMaskedLM"],
        **family.write_keys(config, _KEYS),
        # The class's defaults are ids of ModernBERT's own vocabulary.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
        **_write_layer_types(config),
        "embedding_dropout": config.dropout_rate("embedding"),
        "mlp_dropout": config.dropout_rate("feed_forward"),
        "attention_dropout": config.dropout_rate("attention"),
        "initializer_cutoff_factor": 2.0,
        "tie_word_embeddings": True,
    }


def _write_layer_types(config: EncoderConfig) -> dict[str, Any]:
    """Which layers attend to a window only, and the rotary positions of both types.

    `layer_types` and `rope_parameters` are for version 5 of `transformers`, the three keys before
    them for version 4, which would take its defaults instead without a warning.
    """
    every = config.global_every if config.local_window else 1
    thetas = {_FULL: config.global_rope_theta, _SLIDING: config.local_rope_theta}
    return {
        "local_attention": config.local_window or 128,
        "global_attn_every_n_layers": every,
        "global_rope_theta": config.global_rope_theta,
        "local_rope_theta": config.local_rope_theta,
        "layer_types": _layer_types(config.layers, every),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()
        },
    }


def _rules(config: EncoderConfig) -> Rules:
    layer = r"model.layers.\1"
    return (
        (r"embeddings\.word\.weight", "model.embeddings.tok_embeddings.weight"),
        (r"embeddings\.norm\.(.+)", r"model.embeddings.norm.\1"),
        (ATTENTION + r"\.(query|key|value)\.(.+)", layer + r".attn.\2.\3"),
        (ATTENTION + r"\.output\.(.+)", layer + r".attn.Wo.\2"),
        (ATTENTION + r"\.norm\.(.+)", layer + r".attn_norm.\2"),
        (STACK + r"\.input\.(.+)", layer + r".mlp.Wi.\2"),
        (STACK + r"\.output\.(.+)", layer + r".mlp.Wo.\2"),
        (STACK + r"\.norm\.(.+)", layer + r".mlp_norm.\2"),
        (r"encoder\.final_norm\.(.+)", r"model.final_norm.\1"),
        (r"head\.(dense|norm)\.(.+)", r"head.\1.\2"),
        (r"head\.bias", "decoder.bias"),
    )


_cut = partial(family.cut, joined=_FUSED, parts=_PARTS)
_join = partial(family.join, joined=_FUSED, parts=_PARTS)
MODERNBERT = Family("modernbert", _read, _write, _rules, _HEADS, _cut, _join)
