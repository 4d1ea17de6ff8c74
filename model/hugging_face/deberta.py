"""DeBERTa's second and third version (arXiv 2006.03654, 2111.09543): `DebertaV2ForMaskedLM`."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from model.config import EncoderConfig
from model.hugging_face.bert import PLAIN, POOLED_HEADS, encoder_rules, read_sizes, write_sizes
from model.hugging_face.family import ATTENTION, Family, Rules, refuse, require
from model.hugging_face.task_heads import PROBLEMS, linear
from model.task_head_config import CHOICE

_HEADS = POOLED_HEADS | dict.fromkeys(
    (*PROBLEMS, CHOICE), linear("classifier", "first", gelu="pooler.dense")
)


# The defaults of DebertaV2Config that differ from those of BertConfig, and of what it passes on.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128100,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "intermediate_size": 6144,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
    "relative_attention": False,
    "share_att_key": False,
    "norm_rel_ebd": "none",
    "position_biased_input": True,
    "pos_att_type": None,
}


def _read(theirs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    theirs = _DEFAULTS | dict(theirs)
    kinds = theirs["pos_att_type"] or []
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    refuse(
        theirs | {"pos_att_type": sorted(kinds)},
        {
            "relative_attention": (True,),
            "share_att_key": (True,),
            "norm_rel_ebd": ("layer_norm",),
            "position_biased_input": (False,),
            "pos_att_type": (["c2p", "p2c"],),
            "max_relative_positions": (-1, 0, theirs.get("max_position_embeddings", 512)),
            "embedding_size": (theirs["hidden_size"],),
            "conv_kernel_size": (0, None),
            "pooler_hidden_act": ("gelu",),
            "legacy": (True,),
        },
    )
    return read_sizes(theirs) | {
        "positions": "relative",
        "position_buckets": max(0, theirs.get("position_buckets", -1)),
        "pooler": "none",
        "initializer": "normal",
    }


def _write(config: EncoderConfig) -> dict[str, Any]:
    require(config, "deberta-v2", positions="relative", embedding_projection="none", sharing="none",
            pooler="none", pair_head=False, head_activation=("", config.activation),
            **PLAIN)  # fmt: skip
    return write_sizes(config) | {
        "architectures": ["DebertaV2ForMaskedLM"],
        "relative_attention": True,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "pos_att_type": ["p2c", "c2p"],
        "max_relative_positions": -1,
        "position_buckets": config.position_buckets or -1,
        "pooler_hidden_act": "gelu",
        "pooler_dropout": config.dropout,
    }


def _rules(config: EncoderConfig) -> Rules:
    layer = r"deberta.encoder.layer.\1"
    return (
        (r"encoder\.relative\.table", "deberta.encoder.rel_embeddings.weight"),
        (r"encoder\.relative\.norm\.(.+)", r"deberta.encoder.LayerNorm.\1"),
        (ATTENTION + r"\.(query|key|value)\.(.+)", layer + r".attention.self.\2_proj.\3"),
        *encoder_rules("deberta"),
        (r"head\.dense\.(.+)", r"cls.predictions.transform.dense.\1"),
        (r"head\.norm\.(.+)", r"cls.predictions.transform.LayerNorm.\1"),
        (r"head\.bias", "cls.predictions.bias"),
    )


def _without_unread(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that `transformers` reads: published files also have heads that it has not."""
    unread = "lm_predictions.", "mask_predictions.", "deberta.embeddings.position_embeddings."
    return {name: tensor for name, tensor in state.items() if not name.startswith(unread)}


DEBERTA = Family("deberta-v2", _read, _write, _rules, _HEADS, to_ours=_without_unread)
