"""Nomic BERT (arXiv 2402.01613): BERT with rotary positions, gated units and few biases."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from model.config import EncoderConfig
from model.hugging_face import family
from model.hugging_face.bert import PLAIN, read_sizes, require_segments, write_sizes
from model.hugging_face.family import ATTENTION, BOTH_GATES, STACK, Family, Rules, refuse, require
from model.hugging_face.task_heads import PROBLEMS, linear
from model.task_head_config import TAGGING

_PREFIX = "nomic_bert."
_HEADS = {**dict.fromkeys(PROBLEMS, linear("classifier", "pooler")), TAGGING: linear("classifier")}
# The keys of the checkpoints that came with a class of their own, and of `transformers`.
_FIRST_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "embd_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    "rotary_emb_base": "rope_theta",
}
# The names of tensors in files, which are those of that class, and in `transformers`' class.
_IN_FILES = {
    "encoder.layers.": "layers.",
    "emb_ln.": "embeddings.LayerNorm.",
    ".attn.out_proj.": ".self_attn.o_proj.",
    ".fc11.": ".up_proj.",
    ".fc12.": ".gate_proj.",
    ".fc2.": ".down_proj.",
    ".norm1.": ".post_attention_layernorm.",
    ".norm2.": ".post_mlp_layernorm.",
}
_FUSED, _PARTS = ".attn.Wqkv.", tuple(f".self_attn.{part}_proj." for part in "qkv")


def _read(theirs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    renamed: dict[str, Any] = {
        "vocab_size": 30528,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **{_FIRST_KEYS.get(key, key): value for key, value in theirs.items()},
    }
    if "n_embd" in theirs:
        _refuse_other_parts(renamed)
    sizes = read_sizes(renamed)
    refuse(renamed, {"head_dim": (sizes["hidden_size"] // sizes["heads"], None)})
    return sizes | {
        "positions": "rotary",
        "global_rope_theta": family.read_rope_theta(renamed, 1000.0),
        "feed_forward": "glu",
        "attention_bias": False,
        "ffn_bias": False,
        "pooler": "tanh" if _PREFIX + "pooler.dense.weight" in names else "none",
        "initializer": "normal",
    }


def _refuse_other_parts(theirs: Mapping[str, Any]) -> None:
    """Refuse settings of the first class that the checkpoints do not use."""
    refuse(
        theirs,
        {
            "activation_function": ("swiglu",),
            "prenorm": (False,),
            "use_rms_norm": (False, None),
            "qkv_proj_bias": (False,),
            "mlp_fc1_bias": (False,),
            "mlp_fc2_bias": (False,),
            "rotary_emb_fraction": (1.0,),
            "rotary_emb_interleaved": (False,),
            "rotary_emb_scale_base": (None,),
            "rotary_scaling_factor": (None,),
            "parallel_block": (False,),
        },
    )


def _write(config: EncoderConfig) -> dict[str, Any]:
    parts = PLAIN | {"feed_forward": "glu", "attention_bias": False, "ffn_bias": False}
    require(config, "nomic_bert", positions="rotary", embedding_projection="none", sharing="none",
            pooler=("tanh", "none"), pair_head=False, **parts)  # fmt: skip
    require(config, "nomic_bert", head_activation=("", config.activation))
    require_segments(config, "nomic_bert")
    rope = {"rope_type": "default", "rope_theta": config.global_rope_theta}
    return write_sizes(config) | {
        "architectures": ["NomicBertForMaskedLM"],
        "rope_parameters": rope,
    }


def _rules(config: EncoderConfig) -> Rules:
    layer = _PREFIX + r"layers.\1"
    return (
        (r"embeddings\.word\.weight", _PREFIX + "embeddings.word_embeddings.weight"),
        (r"embeddings\.segment\.weight", _PREFIX + "embeddings.token_type_embeddings.weight"),
        (r"embeddings\.norm\.(.+)", _PREFIX + r"embeddings.LayerNorm.\1"),
        *family.projection_rules(layer + ".self_attn"),
        (ATTENTION + r"\.norm\.(.+)", layer + r".post_attention_layernorm.\2"),
        (STACK + r"\.input\.(.+)", layer + BOTH_GATES + r"\2"),
        (STACK + r"\.output\.(.+)", layer + r".mlp.down_proj.\2"),
        (STACK + r"\.norm\.(.+)", layer + r".post_mlp_layernorm.\2"),
        (r"pooler\.(.+)", _PREFIX + r"pooler.\1"),
        (r"head\.dense\.(.+)", r"cls.predictions.transform.dense.\1"),
        (r"head\.norm\.(.+)", r"cls.predictions.transform.layer_norm.\1"),
        (r"head\.bias", "cls.predictions.bias"),
    )


def _to_ours(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a file, cut each fused ``Wqkv`` [3 H, H] and join gates."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith("bert."):
            name = _PREFIX + name.removeprefix("bert.")
        for in_file, in_class in _IN_FILES.items():
            name = name.replace(in_file, in_class)
        renamed[name] = tensor
    return family.join_gates(family.cut(renamed, _FUSED, _PARTS))


def _to_theirs(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `_to_ours`."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in family.join(family.split_gates(state), _FUSED, _PARTS).items():
        for in_file, in_class in _IN_FILES.items():
            name = name.replace(in_class, in_file)
        renamed[name] = tensor
    return renamed


NOMIC_BERT = Family("nomic_bert", _read, _write, _rules, _HEADS, _to_ours, _to_theirs)
