"""ELECTRA (arXiv 2003.10555): BERT without pooler whose embeddings may be narrower than its layers.

The generator is ``ElectraForMaskedLM``, the discriminator ``ElectraForPreTraining``.
"""

from collections.abc import Collection, Mapping
from typing import Any

from model.config import EncoderConfig
from model.hugging_face.bert import PLAIN, encoder_rules, read_sizes, require_segments, write_sizes
from model.hugging_face.family import Family, Rules, refuse, require
from model.hugging_face.task_heads import DETECTOR, PROBLEMS, linear
from model.task_head_config import CHOICE, DETECTION, SPAN, TAGGING

_HEADS = {
    **dict.fromkeys(PROBLEMS, linear("classifier.out_proj", "first", gelu="classifier.dense")),
    CHOICE: linear("classifier", "first", gelu="sequence_summary.summary"),
    TAGGING: linear("classifier"),
    SPAN: linear("qa_outputs"),
    DETECTION: DETECTOR,
}


def _read(theirs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    # The defaults of ElectraConfig where they differ from BertConfig's.
    defaults = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    refuse(
        theirs,
        {"summary_type": ("first",), "summary_use_proj": (True,), "summary_activation": ("gelu",)},
    )
    if "discriminator_predictions.dense.weight" in names:
        refuse(theirs, {"hidden_act": ("gelu",)})  # its head has the activation of the layers
    sizes = read_sizes(defaults | dict(theirs))
    width = theirs.get("embedding_size", 128)
    return sizes | {
        "embedding_size": width,
        "embedding_projection": "none" if width == sizes["hidden_size"] else "sum",
        "pooler": "none",
        "head_activation": "gelu",
    }


def _write(config: EncoderConfig) -> dict[str, Any]:
    is_narrow = config.word_size != config.hidden_size
    head_activation = "gelu" if config.activation != "gelu" else ("", "gelu")
    require(config, "electra", positions="learned", sharing="none", pooler="none", pair_head=False,
            embedding_projection="sum" if is_narrow else "none",
            head_activation=head_activation, **PLAIN)  # fmt: skip
    require_segments(config, "electra")
    if any(head.kind == DETECTION for head in config.task_heads.values()):
        require(config, "electra", activation="gelu")
    return write_sizes(config) | {
        "architectures": ["ElectraForMaskedLM"],
        "embedding_size": config.word_size,
        "summary_last_dropout": config.dropout,
    }


def _rules(config: EncoderConfig) -> Rules:
    return (
        *encoder_rules("electra"),
        (r"embeddings\.projection\.(.+)", r"electra.embeddings_project.\1"),
        (r"head\.dense\.(.+)", r"generator_predictions.dense.\1"),
        (r"head\.norm\.(.+)", r"generator_predictions.LayerNorm.\1"),
        (r"head\.bias", "generator_lm_head.bias"),
    )


ELECTRA = Family("electra", _read, _write, _rules, _HEADS)
