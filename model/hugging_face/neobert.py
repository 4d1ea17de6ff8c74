"""NeoBERT (arXiv 2502.19587), whose class comes with its checkpoint: `tandem import` reads it."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from model.config import EncoderConfig
from model.hugging_face.family import ATTENTION, STACK, Family, Inexpressible, Rules, refuse

_FUSED = ".qkv."
_PARTS = ("query", "key", "value")


def _read(theirs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    refuse(
        theirs,
        {
            "hidden_act": ("SwiGLU", "swiglu"),
            "rms_norm": (True,),
            "rope": (True,),
            "ngpt": (False,),
        },
    )
    return {
        "vocab_size": theirs.get("vocab_size", 30522),
        "hidden_size": theirs.get("hidden_size", 768),
        "layers": theirs.get("num_hidden_layers", 28),
        "heads": _heads(theirs),
        # Two thirds of the width without a gate, as a multiple of 8.
        "ffn_size": -(-int(2 * theirs.get("intermediate_size", 3072) / 3) // 8) * 8,
        "max_positions": theirs.get("max_length", 1024),
        "segment_types": 0,
        "pad_token_id": theirs.get("pad_token_id", 0),
        "positions": "rotary",
        "global_rope_theta": 10000.0,
        "embedding_norm": False,
        "norm": "rms_norm",
        "norm_eps": theirs.get("norm_eps", 1e-6),
        "norm_placement": "pre",
        "activation": "silu",
        "feed_forward": "glu",
        "attention_bias": False,
        "ffn_bias": False,
        "pooler": "none",
        "head_transform": False,
        "tied_decoder": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "initializer": "normal",
    }


def _heads(theirs: Mapping[str, Any]) -> int:
    return int(theirs.get("num_attention_heads", 12))


def _write(config: EncoderConfig) -> dict[str, Any]:
    raise Inexpressible("transformers has no class for NeoBERT")


def _rules(config: EncoderConfig) -> Rules:
    layer = r"model.transformer_encoder.\1"
    return (
        (r"embeddings\.word\.weight", "model.encoder.weight"),
        (ATTENTION + r"\.(query|key|value)\.(.+)", layer + r".\2.\3"),
        (ATTENTION + r"\.output\.(.+)", layer + r".wo.\2"),
        (ATTENTION + r"\.norm\.(.+)", layer + r".attention_norm.\2"),
        (STACK + r"\.input\.(.+)", layer + r".ffn.w12.\2"),
        (STACK + r"\.output\.(.+)", layer + r".ffn.w3.\2"),
        (STACK + r"\.norm\.(.+)", layer + r".ffn_norm.\2"),
        (r"encoder\.final_norm\.(.+)", r"model.layer_norm.\1"),
        (r"head\.decoder", "decoder.weight"),
        (r"head\.bias", "decoder.bias"),
    )


def _cut(theirs: Mapping[str, Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cut each fused ``qkv`` [3 H, H], which has each head's query, key and value in turn.

    Their rotary positions turn neighbouring numbers of a query or key, and ours those of its two
    halves: the even numbers become the first half.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if _FUSED not in name or len(tensor) % (6 * _heads(theirs)):
            result[name] = tensor
            continue
        by_head = tensor.unflatten(0, (_heads(theirs), 3, -1, 2))  # [A, 3, D / 2, 2, H]
        halves = by_head.transpose(2, 3)
        for part, piece in enumerate((halves[:, 0], halves[:, 1], by_head[:, 2])):
            result[name.replace(_FUSED, f".{_PARTS[part]}.")] = piece.flatten(0, 2)
    return result


NEOBERT = Family("neobert", _read, _write, _rules, cut=_cut)
