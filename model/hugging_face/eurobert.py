"""EuroBERT (arXiv 2503.05500): RMS norms, grouped heads, an untied projection without transform."""

from collections.abc import Collection, Mapping
from typing import Any

from model.config import EncoderConfig
from model.hugging_face import family
from model.hugging_face.family import ATTENTION, BOTH_GATES, STACK, Family, Rules, refuse, require


def _read(theirs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    hidden, heads = theirs.get("hidden_size", 768), theirs.get("num_attention_heads", 12)
    refuse(theirs, {"head_dim": (None, hidden // heads), "rope_scaling": (None,)})
    rope = theirs.get("rope_parameters") or {}
    refuse(rope, {"rope_type": ("default",)})
    bias, pad = theirs.get("mlp_bias", False), theirs.get("pad_token_id", 128001)
    return {
        "vocab_size": theirs.get("vocab_size", 128256),
        "hidden_size": hidden,
        "layers": theirs.get("num_hidden_layers", 12),
        "heads": heads,
        "kv_heads": theirs.get("num_key_value_heads") or heads,
        "ffn_size": theirs.get("intermediate_size", 3072),
        "max_positions": theirs.get("max_position_embeddings", 8192),
        "segment_types": 0,
        "pad_token_id": -1 if pad is None else pad,
        "positions": "rotary",
        "embedding_norm": False,
        "norm": "rms_norm",
        "norm_eps": theirs.get("rms_norm_eps", 1e-5),
        "norm_placement": "pre",
        "activation": family.read_activation(theirs.get("hidden_act", "silu")),
        "feed_forward": "glu",
        "attention_bias": theirs.get("attention_bias", False),
        "ffn_bias": bias,
        "global_rope_theta": float(rope.get("rope_theta", theirs.get("rope_theta", 250000.0))),
        "pooler": "none",
        "head_transform": False,
        "tied_decoder": theirs.get("tie_word_embeddings", False),
        "decoder_bias": bias,
        "dropout": 0.0,
        "attention_dropout": theirs.get("attention_dropout", 0.0),
        "dropout_at": ["attention"],
        "initializer": "normal",
        "initializer_range": theirs.get("initializer_range", 0.02),
    }


def _write(config: EncoderConfig) -> dict[str, Any]:
    require(config, "eurobert", positions="rotary", embedding_projection="none", trigram=False,
            segment_types=0, embedding_norm=False, norm="rms_norm", fixed_norm_eps=0.0,
            norm_placement="pre", feed_forward="glu", feed_forwards=1, bottleneck_size=0,
            sharing="none", pooler="none", head_transform=False, local_window=0,
            decoder_bias=config.ffn_bias)  # fmt: skip
    return {
        "architectures": ["EuroBertForMaskedLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "intermediate_size": config.ffn_size,
        "max_position_embeddings": config.max_positions,
        "pad_token_id": None if config.pad_token_id < 0 else config.pad_token_id,
        # The class's defaults are ids of EuroBERT's own vocabulary.
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
        "rms_norm_eps": config.norm_eps,
        "hidden_act": family.write_activation(config.activation),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.ffn_bias,
        "rope_theta": config.global_rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.global_rope_theta},
        "attention_dropout": config.dropout_rate("attention"),
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tied_decoder,
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


EUROBERT = Family("eurobert", _read, _write, _rules, {}, family.join_gates, family.split_gates)
