"""EuroBERT (arXiv 2503.05500): RMS norms, grouped heads, an untied projection without transform."""

from collections.abc import Collection, Mapping
from typing import Any

from model.config import EncoderConfig
from model.hugging_face import family
from model.hugging_face.family import ATTENTION, BOTH_GATES, STACK, Family, Rules, refuse, require
from model.hugging_face.task_heads import linear
from model.task_head_config import TAGGING

_KEYS: family.Keys = {
    "vocab_size": ("vocab_size", 128256),
    "hidden_size": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 12),
    "ffn_size": ("intermediate_size", 3072),
    "max_positions": ("max_position_embeddings", 8192),
    "pad_token_id": ("pad_token_id", 128001),
    "norm_eps": ("rms_norm_eps", 1e-5),
    "activation": ("hidden_act", "silu"),
    "attention_bias": ("attention_bias", False),
    "ffn_bias": ("mlp_bias", False),
    "tied_decoder": ("tie_word_embeddings", False),
    "initializer_range": ("initializer_range", 0.02),
}


def _read(theirs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    read = family.read_keys(theirs, _KEYS)
    head_dim = read["hidden_size"] // read["heads"]
    refuse(theirs, {"head_dim": (head_dim, None)})
    return read | {
        "kv_heads": theirs.get("num_key_value_heads") or read["heads"],
        "segment_types": 0,
        "positions": "rotary",
        "embedding_norm": False,
        "norm": "rms_norm",
        "norm_placement": "pre",
        "feed_forward": "glu",
        "global_rope_theta": family.read_rope_theta(theirs, 250000.0),
        "pooler": "none",
        "head_transform": False,
        "decoder_bias": read["ffn_bias"],
        "dropout": 0.0,
        "attention_dropout": theirs.get("attention_dropout", 0.0),
        "dropout_at": ["attention"],
        "initializer": "normal",
    }


def _write(config: EncoderConfig) -> dict[str, Any]:
    require(config, "eurobert", positions="rotary", embedding_projection="none", trigram=False,
            segment_types=0, embedding_norm=False, norm="rms_norm", fixed_norm_eps=0.0,
            norm_placement="pre", feed_forward="glu", feed_forwards=1, bottleneck_size=0,
            sharing="none", pooler="none", head_transform=False, local_window=0,
            decoder_bias=config.ffn_bias)  # fmt: skip
    return {
        "architectures": ["EuroBertForMaskedLM"],
        **family.write_keys(config, _KEYS),
        "num_key_value_heads": config.key_value_heads,
        # The class's defaults are ids of EuroBERT's own vocabulary.
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
        "rope_theta": config.global_rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.global_rope_theta},
        "attention_dropout": config.dropout_rate("attention"),
    }


def _rules(config: EncoderConfig) -> Rules:
    layer = r"model.layers.\1"
    return (
        (r"embeddings\.word\.weight", "model.embed_tokens.weight"),
        *family.projection_rules(layer + ".self_attn"),
        (ATTENTION + r"\.norm\.(.+)", layer + r".input_layernorm.\2"),
        (STACK + r"\.input\.(.+)", layer + BOTH_GATES + r"\2"),
        (STACK + r"\.output\.(.+)", layer + r".mlp.down_proj.\2"),
        (STACK + r"\.norm\.(.+)", layer + r".post_attention_layernorm.\2"),
        (r"encoder\.final_norm\.(.+)", r"model.norm.\1"),
        (r"head\.decoder", "lm_head.weight"),
        (r"head\.bias", "lm_head.bias"),
    )


_HEADS = {TAGGING: linear("classifier")}
EUROBERT = Family("eurobert", _read, _write, _rules, _HEADS, family.join_gates, family.split_gates)
