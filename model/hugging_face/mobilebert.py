"""MobileBERT (arXiv 2004.02984). Its teacher, IB-BERT, has no class in `transformers`."""

from collections.abc import Collection, Mapping
from typing import Any

from model.config import EncoderConfig
from model.errors import ModelError
from model.hugging_face.bert import (
    PAIR_CLASS,
    POOLED_HEADS,
    read_sizes,
    require_segments,
    write_sizes,
)
from model.hugging_face.family import Family, Inexpressible, Rules, require

# The class leaves the epsilon of two layer norms at torch's default.
_UNSET_EPS = 1e-5


def _read(theirs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    defaults = {
        "hidden_size": 512,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "hidden_act": "relu",
        "hidden_dropout_prob": 0.0,
    }
    sizes = read_sizes(defaults | dict(theirs))
    embedding_size = theirs.get("embedding_size", 128)
    if embedding_size >= sizes["hidden_size"]:
        raise ModelError("embedding_size: must be less than hidden_size")
    norm = theirs.get("normalization_type", "no_norm")
    if theirs.get("classifier_activation", True):
        pooler = "tanh" if "mobilebert.pooler.dense.weight" in names else "none"
    else:
        pooler = "first"
    return sizes | {
        "embedding_size": embedding_size,
        "embedding_projection": "word",
        "trigram": theirs.get("trigram_input", True),
        "norm": norm,
        "fixed_norm_eps": _UNSET_EPS if norm == "layer_norm" else 0.0,
        "feed_forwards": theirs.get("num_feedforward_networks", 4),
        "bottleneck_size": _read_bottleneck(theirs),
        "bottleneck_attention": _read_bottleneck_attention(theirs),
        "pooler": pooler,
        "pair_head": "cls.seq_relationship.weight" in names,
    }


def _read_bottleneck(theirs: Mapping[str, Any]) -> int:
    if not theirs.get("use_bottleneck", True):
        return 0
    return int(theirs.get("intra_bottleneck_size", 128))


def _read_bottleneck_attention(theirs: Mapping[str, Any]) -> str:
    if theirs.get("use_bottleneck_attention", False):
        return "inner"
    return "shared" if theirs.get("key_query_shared_bottleneck", True) else "hidden"


def _write(config: EncoderConfig) -> dict[str, Any]:
    require(config, "mobilebert", positions="learned", embedding_projection="word",
            embedding_norm=True, norm_bias=True, norm_placement="post", feed_forward="mlp",
            attention_bias=True, ffn_bias=True, local_window=0, sharing="none", head_bias=True,
            decoder_bias=True, head_activation=("", config.activation))  # fmt: skip
    require_segments(config, "mobilebert")
    if config.word_size >= config.hidden_size:
        raise Inexpressible("transformers' mobilebert needs embedding_size below hidden_size")
    if config.bottleneck_size not in (0, config.hidden_size):
        require(config, "mobilebert", bottleneck_attention=("shared", "inner"))
    if config.norm == "layer_norm" and config.norm_eps != _UNSET_EPS:
        require(config, "mobilebert", fixed_norm_eps=_UNSET_EPS)
    architecture = "MobileBertForPreTraining" if config.pair_head else "MobileBertForMaskedLM"
    return write_sizes(config) | {
        "architectures": [architecture],
        "embedding_size": config.word_size,
        "trigram_input": config.trigram,
        "use_bottleneck": config.bottleneck_size > 0,
        "intra_bottleneck_size": config.inner_size,
        "use_bottleneck_attention": config.bottleneck_attention == "inner",
        "key_query_shared_bottleneck": config.bottleneck_attention == "shared",
        "num_feedforward_networks": config.feed_forwards,
        "normalization_type": config.norm,
        "classifier_activation": config.pooler != "first",
    }


def _rules(config: EncoderConfig) -> Rules:
    layer = r"mobilebert.encoder.layer.\1"
    attention, stack = r"encoder\.attention\.(\d+)", r"encoder\.feed_forward\.(\d+)"
    narrow = attention + r"\.bottleneck"
    last = stack + rf"\.stack\.{config.feed_forwards - 1}"
    inner = stack + r"\.stack\.(\d+)"
    return (
        (r"embeddings\.(word|position)\.weight", r"mobilebert.embeddings.\1_embeddings.weight"),
        (r"embeddings\.segment\.weight", "mobilebert.embeddings.token_type_embeddings.weight"),
        (r"embeddings\.projection\.(.+)", r"mobilebert.embeddings.embedding_transformation.\1"),
        (r"embeddings\.norm\.(.+)", r"mobilebert.embeddings.LayerNorm.\1"),
        (narrow + r"\.input\.dense\.(.+)", layer + r".bottleneck.input.dense.\2"),
        (narrow + r"\.input\.norm\.(.+)", layer + r".bottleneck.input.LayerNorm.\2"),
        (narrow + r"\.shared\.dense\.(.+)", layer + r".bottleneck.attention.dense.\2"),
        (narrow + r"\.shared\.norm\.(.+)", layer + r".bottleneck.attention.LayerNorm.\2"),
        (attention + r"\.(query|key|value)\.(.+)", layer + r".attention.self.\2.\3"),
        (attention + r"\.output\.(.+)", layer + r".attention.output.dense.\2"),
        (attention + r"\.norm\.(.+)", layer + r".attention.output.LayerNorm.\2"),
        (last + r"\.input\.(.+)", layer + r".intermediate.dense.\2"),
        (last + r"\.output\.(.+)", layer + r".output.dense.\2"),
        (last + r"\.norm\.(.+)", layer + r".output.LayerNorm.\2"),
        (inner + r"\.input\.(.+)", layer + r".ffn.\2.intermediate.dense.\3"),
        (inner + r"\.output\.(.+)", layer + r".ffn.\2.output.dense.\3"),
        (inner + r"\.norm\.(.+)", layer + r".ffn.\2.output.LayerNorm.\3"),
        (stack + r"\.widen\.dense\.(.+)", layer + r".output.bottleneck.dense.\2"),
        (stack + r"\.widen\.norm\.(.+)", layer + r".output.bottleneck.LayerNorm.\2"),
        (r"pooler\.(.+)", r"mobilebert.pooler.\1"),
        (r"head\.dense\.(.+)", r"cls.predictions.transform.dense.\1"),
        (r"head\.norm\.(.+)", r"cls.predictions.transform.LayerNorm.\1"),
        (r"head\.bias", "cls.predictions.bias"),
        (r"head\.extra", "cls.predictions.dense.weight"),
        (r"pair_head\.(.+)", r"cls.seq_relationship.\1"),
    )


MOBILEBERT = Family("mobilebert", _read, _write, _rules, POOLED_HEADS, pair_class=PAIR_CLASS)
