"""ALBERT (arXiv 1909.11942): factorised embedding, layers shared in groups."""

from collections.abc import Collection, Mapping
from typing import Any

from model.config import EncoderConfig
from model.hugging_face.bert import PLAIN, POOLED_HEADS, read_sizes, require_segments, write_sizes
from model.hugging_face.family import (
    ATTENTION,
    STACK,
    Family,
    Inexpressible,
    Rules,
    refuse,
    require,
)


def _read(theirs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    # The defaults of AlbertConfig where they differ from BertConfig's.
    defaults = {
        "vocab_size": 30000,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    refuse(theirs, {"inner_group_num": (1,)})
    sizes = read_sizes(defaults | dict(theirs))
    groups, layers = theirs.get("num_hidden_groups", 1), sizes["layers"]
    shared = groups < layers or layers == 1
    _require_equal_groups(layers, groups)
    return sizes | {
        "embedding_size": theirs.get("embedding_size", 128),
        "embedding_projection": "sum",
        "sharing": "all" if shared else "none",
        "groups": groups if shared else 1,
        "pooler": "tanh" if "albert.pooler.weight" in names else "none",
        "pair_head": "sop_classifier.classifier.weight" in names,
    }


def _write(config: EncoderConfig) -> dict[str, Any]:
    require(config, "albert", positions="learned", embedding_projection="sum",
            sharing=("all", "none"), pooler=("tanh", "none"),
            head_activation=("", config.activation), **PLAIN)  # fmt: skip
    require_segments(config, "albert")
    groups = config.groups if config.sharing == "all" else config.layers
    _require_equal_groups(config.layers, groups)
    architecture = "AlbertForPreTraining" if config.pair_head else "AlbertForMaskedLM"
    return write_sizes(config) | {
        "architectures": [architecture],
        "embedding_size": config.word_size,
        "num_hidden_groups": groups,
        "inner_group_num": 1,
        "classifier_dropout_prob": config.dropout,
    }


def _require_equal_groups(layers: int, groups: int) -> None:
    """Raise Inexpressible if `transformers`, which divides floats, assigns other groups."""
    theirs = [int(i / (layers / groups)) for i in range(layers)]
    if theirs != [i * groups // layers for i in range(layers)]:
        raise Inexpressible(
            f"transformers' albert rounds {groups} groups of {layers} layers differently"
        )


def _rules(config: EncoderConfig) -> Rules:
    layer = r"albert.encoder.albert_layer_groups.\1.albert_layers.0"
    return (
        (r"embeddings\.(word|position)\.weight", r"albert.embeddings.\1_embeddings.weight"),
        (r"embeddings\.segment\.weight", "albert.embeddings.token_type_embeddings.weight"),
        (r"embeddings\.norm\.(.+)", r"albert.embeddings.LayerNorm.\1"),
        (r"embeddings\.projection\.(.+)", r"albert.encoder.embedding_hidden_mapping_in.\1"),
        (ATTENTION + r"\.(query|key|value)\.(.+)", layer + r".attention.\2.\3"),
        (ATTENTION + r"\.output\.(.+)", layer + r".attention.dense.\2"),
        (ATTENTION + r"\.norm\.(.+)", layer + r".attention.LayerNorm.\2"),
        (STACK + r"\.input\.(.+)", layer + r".ffn.\2"),
        (STACK + r"\.output\.(.+)", layer + r".ffn_output.\2"),
        (STACK + r"\.norm\.(.+)", layer + r".full_layer_layer_norm.\2"),
        (r"pooler\.dense\.(.+)", r"albert.pooler.\1"),
        (r"head\.dense\.(.+)", r"predictions.dense.\1"),
        (r"head\.norm\.(.+)", r"predictions.LayerNorm.\1"),
        (r"head\.bias", "predictions.bias"),
        (r"pair_head\.(.+)", r"sop_classifier.classifier.\1"),
    )


ALBERT = Family("albert", _read, _write, _rules, POOLED_HEADS)
