"""DistilBERT (arXiv 1910.01108): BERT without segment vectors and pooler."""

from collections.abc import Collection, Mapping
from typing import Any

from model.config import EncoderConfig
from model.hugging_face import family
from model.hugging_face.bert import PLAIN, POOLED_HEADS
from model.hugging_face.family import ATTENTION, STACK, Family, Rules, refuse, require
from model.hugging_face.task_heads import PROBLEMS, linear
from model.task_head_config import CHOICE

_HEADS = POOLED_HEADS | dict.fromkeys(
    (*PROBLEMS, CHOICE), linear("classifier", "first", relu="pre_classifier")
)


_KEYS: family.Keys = {
    "vocab_size": ("vocab_size", 30522),
    "hidden_size": ("dim", 768),
    "layers": ("n_layers", 6),
    "heads": ("n_heads", 12),
    "ffn_size": ("hidden_dim", 3072),
    "max_positions": ("max_position_embeddings", 512),
    "pad_token_id": ("pad_token_id", 0),
    "activation": ("activation", "gelu"),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "initializer_range": ("initializer_range", 0.02),
}


def _read(theirs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    refuse(theirs, {"tie_word_embeddings": (True,)})
    return family.read_keys(theirs, _KEYS) | {
        "segment_types": 0,
        "pooler": "none",
        "dropout_at": ["embedding", "attention", "feed_forward", "head"],
        "initializer": "normal",
    }


def _write(config: EncoderConfig) -> dict[str, Any]:
    require(config, "distilbert", positions="learned", embedding_projection="none",
            sharing="none", segment_types=0, norm_eps=1e-12, pooler="none",
            head_activation=("", config.activation), **PLAIN)  # fmt: skip
    return {
        "architectures": ["DistilBertForMaskedLM"],
        **family.write_keys(config, _KEYS),
        "sinusoidal_pos_embds": False,
        "tie_word_embeddings": True,
    }


def _rules(config: EncoderConfig) -> Rules:
    layer = r"distilbert.transformer.layer.\1"
    return (
        (r"embeddings\.(word|position)\.weight", r"distilbert.embeddings.\1_embeddings.weight"),
        (r"embeddings\.norm\.(.+)", r"distilbert.embeddings.LayerNorm.\1"),
        (ATTENTION + r"\.query\.(.+)", layer + r".attention.q_lin.\2"),
        (ATTENTION + r"\.key\.(.+)", layer + r".attention.k_lin.\2"),
        (ATTENTION + r"\.value\.(.+)", layer + r".attention.v_lin.\2"),
        (ATTENTION + r"\.output\.(.+)", layer + r".attention.out_lin.\2"),
        (ATTENTION + r"\.norm\.(.+)", layer + r".sa_layer_norm.\2"),
        (STACK + r"\.input\.(.+)", layer + r".ffn.lin1.\2"),
        (STACK + r"\.output\.(.+)", layer + r".ffn.lin2.\2"),
        (STACK + r"\.norm\.(.+)", layer + r".output_layer_norm.\2"),
        (r"head\.dense\.(.+)", r"vocab_transform.\1"),
        (r"head\.norm\.(.+)", r"vocab_layer_norm.\1"),
        (r"head\.bias", "vocab_projector.bias"),
    )


DISTILBERT = Family("distilbert", _read, _write, _rules, _HEADS)
