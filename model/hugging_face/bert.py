"""BERT (arXiv 1810.04805), which also holds TinyBERT, and RoBERTa (arXiv 1907.11692)."""

from collections.abc import Collection, Mapping
from typing import Any

from model.config import EncoderConfig
from model.hugging_face import family
from model.hugging_face.family import ATTENTION, STACK, Family, Rules, refuse, require
from model.hugging_face.task_heads import PROBLEMS, linear
from model.task_head_config import CHOICE, SPAN, TAGGING

# The settings shared by every post-norm model with layer norms and no bottleneck.
PLAIN: dict[str, object] = {
    "trigram": False,
    "embedding_norm": True,
    "norm": "layer_norm",
    "fixed_norm_eps": 0.0,
    "norm_bias": True,
    "norm_placement": "post",
    "feed_forward": "mlp",
    "feed_forwards": 1,
    "attention_bias": True,
    "ffn_bias": True,
    "bottleneck_size": 0,
    "local_window": 0,
    "head_bias": True,
    "decoder_bias": True,
}


# The heads of every class that has BERT's pooler.
POOLED_HEADS = {
    **dict.fromkeys((*PROBLEMS, CHOICE), linear("classifier", "pooler")),
    TAGGING: linear("classifier"),
    SPAN: linear("qa_outputs"),
}
_ROBERTA_HEADS = POOLED_HEADS | dict.fromkeys(
    PROBLEMS, linear("classifier.out_proj", "first", tanh="classifier.dense")
)


_SIZES: family.Keys = {
    "vocab_size": ("vocab_size", 30522),
    "hidden_size": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 12),
    "ffn_size": ("intermediate_size", 3072),
    "max_positions": ("max_position_embeddings", 512),
    "segment_types": ("type_vocab_size", 2),
    "pad_token_id": ("pad_token_id", 0),
    "activation": ("hidden_act", "gelu"),
    "norm_eps": ("layer_norm_eps", 1e-12),
    "dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "initializer_range": ("initializer_range", 0.02),
}


def read_sizes(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `EncoderConfig` for settings that all BERT-like classes name alike."""
    refuse(
        theirs,
        {
            "position_embedding_type": ("absolute", None),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
    )
    return family.read_keys(theirs, _SIZES)


def write_sizes(config: EncoderConfig) -> dict[str, Any]:
    """The reverse of `read_sizes`."""
    return {**family.write_keys(config, _SIZES), "tie_word_embeddings": True}


def require_segments(config: EncoderConfig, model_type: str) -> None:
    """Raise Inexpressible for a model without segment vectors: the class always adds them."""
    require(config, model_type, segment_types=tuple(range(1, config.segment_types + 1)))


def encoder_rules(prefix: str) -> Rules:
    """Rules for BERT's names of embeddings, layers and pooler under ``prefix.``."""
    layer = rf"{prefix}.encoder.layer.\1"
    return (
        (r"embeddings\.word\.weight", f"{prefix}.embeddings.word_embeddings.weight"),
        (r"embeddings\.position\.weight", f"{prefix}.embeddings.position_embeddings.weight"),
        (r"embeddings\.segment\.weight", f"{prefix}.embeddings.token_type_embeddings.weight"),
        (r"embeddings\.norm\.(.+)", rf"{prefix}.embeddings.LayerNorm.\1"),
        (ATTENTION + r"\.(query|key|value)\.(.+)", layer + r".attention.self.\2.\3"),
        (ATTENTION + r"\.output\.(.+)", layer + r".attention.output.dense.\2"),
        (ATTENTION + r"\.norm\.(.+)", layer + r".attention.output.LayerNorm.\2"),
        (STACK + r"\.input\.(.+)", layer + r".intermediate.dense.\2"),
        (STACK + r"\.output\.(.+)", layer + r".output.dense.\2"),
        (STACK + r"\.norm\.(.+)", layer + r".output.LayerNorm.\2"),
        (r"pooler\.(.+)", rf"{prefix}.pooler.\1"),
    )


def _read_bert(theirs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return read_sizes(theirs) | {
        "pooler": "tanh" if "bert.pooler.dense.weight" in names else "none",
        "pair_head": "cls.seq_relationship.weight" in names,
    }


def _write_bert(config: EncoderConfig) -> dict[str, Any]:
    require(config, "bert", positions="learned", embedding_projection="none", sharing="none",
            pooler=("tanh", "none"), head_activation=("", config.activation), **PLAIN)  # fmt: skip
    require_segments(config, "bert")
    architecture = "BertForPreTraining" if config.pair_head else "BertForMaskedLM"
    return write_sizes(config) | {"architectures": [architecture]}


def _bert_rules(config: EncoderConfig) -> Rules:
    return (
        *encoder_rules("bert"),
        (r"head\.dense\.(.+)", r"cls.predictions.transform.dense.\1"),
        (r"head\.norm\.(.+)", r"cls.predictions.transform.LayerNorm.\1"),
        (r"head\.bias", "cls.predictions.bias"),
        (r"pair_head\.(.+)", r"cls.seq_relationship.\1"),
    )


def _read_roberta(theirs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    # The defaults of RobertaConfig where they differ from BertConfig's.
    theirs = {"vocab_size": 50265, "pad_token_id": 1, **theirs}
    return read_sizes(theirs) | {
        "positions": "learned_after_padding",
        "pooler": "tanh" if "roberta.pooler.dense.weight" in names else "none",
        "head_activation": "gelu",
        "initializer": "normal",
    }


def _write_roberta(config: EncoderConfig) -> dict[str, Any]:
    head_activation = "gelu" if config.activation != "gelu" else ("", "gelu")
    require(config, "roberta", positions="learned_after_padding", embedding_projection="none",
            sharing="none", pooler=("tanh", "none"), pair_head=False,
            head_activation=head_activation, **PLAIN)  # fmt: skip
    require_segments(config, "roberta")
    return write_sizes(config) | {"architectures": ["RobertaForMaskedLM"]}


def _roberta_rules(config: EncoderConfig) -> Rules:
    return (
        *encoder_rules("roberta"),
        (r"head\.dense\.(.+)", r"lm_head.dense.\1"),
        (r"head\.norm\.(.+)", r"lm_head.layer_norm.\1"),
        (r"head\.bias", "lm_head.bias"),
    )


PAIR_CLASS = "ForNextSentencePrediction"
BERT = Family("bert", _read_bert, _write_bert, _bert_rules, POOLED_HEADS, pair_class=PAIR_CLASS)
ROBERTA = Family("roberta", _read_roberta, _write_roberta, _roberta_rules, _ROBERTA_HEADS)
