"""Small and unusual random models of `transformers`, to compare with."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    BertConfig,
    BertForPreTraining,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    EuroBertConfig,
    EuroBertForMaskedLM,
    MobileBertConfig,
    MobileBertForPreTraining,
    ModernBertConfig,
    ModernBertForMaskedLM,
    NomicBertConfig,
    NomicBertForMaskedLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

VOCABULARY = 101


def _sizes(layers: int, hidden: int, heads: int, ffn: int, **more: object) -> dict[str, object]:
    return {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "max_position_embeddings": 160,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **more,
    }


def _distilbert(layers: int, hidden: int, heads: int, ffn: int, **more: object) -> DistilBertConfig:
    return DistilBertConfig(
        vocab_size=VOCABULARY, n_layers=layers, dim=hidden, n_heads=heads, hidden_dim=ffn,
        max_position_embeddings=160, dropout=0.0, attention_dropout=0.0, **more,
    )  # fmt: skip


def _modernbert(layers: int, hidden: int, heads: int, ffn: int, **more: object) -> ModernBertConfig:
    return ModernBertConfig(
        vocab_size=VOCABULARY, num_hidden_layers=layers, hidden_size=hidden,
        num_attention_heads=heads, intermediate_size=ffn, max_position_embeddings=160,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, **more,
    )  # fmt: skip


def _eurobert(layers: int, hidden: int, heads: int, ffn: int, **more: object) -> EuroBertConfig:
    return EuroBertConfig(
        vocab_size=VOCABULARY, num_hidden_layers=layers, hidden_size=hidden,
        num_attention_heads=heads, intermediate_size=ffn, max_position_embeddings=160,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **more,
    )  # fmt: skip


def _nomic_bert(layers: int, hidden: int, heads: int, ffn: int, **more: object) -> NomicBertConfig:
    rope = {"rope_type": "default", "rope_theta": 300.0}
    return NomicBertConfig(**_sizes(layers, hidden, heads, ffn, rope_parameters=rope, **more))


def _deberta(layers: int, hidden: int, heads: int, ffn: int, **more: object) -> DebertaV2Config:
    relative = {"relative_attention": True, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
    relative |= {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    return DebertaV2Config(**_sizes(layers, hidden, heads, ffn, **relative, **more))


CASES = {
    "bert one head": BertForPreTraining(BertConfig(**_sizes(2, 10, 1, 7))),
    "bert odd": BertForPreTraining(
        BertConfig(**_sizes(3, 45, 5, 77, type_vocab_size=3, pad_token_id=5))
    ),
    "bert relu": BertForPreTraining(
        BertConfig(**_sizes(1, 28, 4, 112, hidden_act="relu", layer_norm_eps=1e-6))
    ),
    # From 32 on, long sequences go through the fused kernel.
    "bert wide heads": BertForPreTraining(BertConfig(**_sizes(2, 66, 2, 50))),
    "roberta": RobertaForMaskedLM(
        RobertaConfig(**_sizes(3, 30, 2, 41, type_vocab_size=1, layer_norm_eps=1e-5))
    ),
    "roberta other head": RobertaForMaskedLM(
        RobertaConfig(**_sizes(2, 21, 3, 60, hidden_act="relu", pad_token_id=0))
    ),
    "distilbert": DistilBertForMaskedLM(_distilbert(3, 35, 7, 51)),
    "distilbert tanh": DistilBertForMaskedLM(_distilbert(1, 24, 2, 96, activation="gelu_new")),
    "albert all shared": AlbertForPreTraining(
        AlbertConfig(**_sizes(4, 36, 3, 50, embedding_size=14))
    ),
    "albert groups": AlbertForPreTraining(
        AlbertConfig(**_sizes(5, 20, 4, 33, embedding_size=9, num_hidden_groups=3))
    ),
    "albert not shared": AlbertForPreTraining(
        AlbertConfig(**_sizes(3, 22, 2, 44, embedding_size=22, num_hidden_groups=3))
    ),
    "mobilebert": MobileBertForPreTraining(
        MobileBertConfig(**_sizes(3, 40, 3, 37, embedding_size=15, intra_bottleneck_size=21))
    ),
    "mobilebert layer norm, first token": MobileBertForPreTraining(
        MobileBertConfig(
            **_sizes(2, 32, 4, 30, embedding_size=8, intra_bottleneck_size=20, hidden_act="gelu"),
            normalization_type="layer_norm",
            classifier_activation=False,
            use_bottleneck_attention=True,
            num_feedforward_networks=1,
            trigram_input=False,
        )
    ),
    "mobilebert without bottleneck": MobileBertForPreTraining(
        MobileBertConfig(**_sizes(2, 30, 5, 40, embedding_size=12, use_bottleneck=False))
    ),
    "modernbert": ModernBertForMaskedLM(_modernbert(5, 36, 3, 27, local_attention=6)),
    "modernbert wide heads": ModernBertForMaskedLM(_modernbert(3, 64, 2, 31, local_attention=8)),
    "modernbert with biases": ModernBertForMaskedLM(
        _modernbert(
            3,
            32,
            2,
            41,
            local_attention=9,
            attention_bias=True,
            mlp_bias=True,
            norm_bias=True,
            classifier_bias=True,
            decoder_bias=False,
            hidden_activation="silu",
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        )
    ),
    "electra generator": ElectraForMaskedLM(
        ElectraConfig(**_sizes(3, 28, 4, 45, embedding_size=10, hidden_act="relu"))
    ),
    "electra generator of full width": ElectraForMaskedLM(
        ElectraConfig(**_sizes(2, 28, 4, 45, embedding_size=28, hidden_act="relu"))
    ),
    "eurobert": EuroBertForMaskedLM(_eurobert(3, 36, 6, 27, num_key_value_heads=2)),
    "eurobert with biases": EuroBertForMaskedLM(
        _eurobert(
            *(2, 64, 2, 31),
            num_key_value_heads=1,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            hidden_act="gelu",
        )
    ),
    "deberta": DebertaV2ForMaskedLM(_deberta(3, 36, 3, 27, position_buckets=8)),
    "deberta wide heads": DebertaV2ForMaskedLM(
        _deberta(2, 64, 2, 31, type_vocab_size=2, hidden_act="relu", layer_norm_eps=1e-6)
    ),
    "nomic bert": NomicBertForMaskedLM(_nomic_bert(3, 36, 3, 27)),
    "nomic bert wide heads": NomicBertForMaskedLM(
        _nomic_bert(2, 64, 2, 31, hidden_act="gelu", type_vocab_size=1, layer_norm_eps=1e-6)
    ),
}


def reference(case: str) -> PreTrainedModel:
    """The `transformers` model of a case, with weights large enough for differences to show.

    Without norms, large weights would amplify rounding from layer to layer.
    """
    found = CASES[case].eval()
    generator = torch.Generator().manual_seed(len(case))
    scale = 0.1 if getattr(found.config, "normalization_type", "") == "no_norm" else 0.2
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            is_norm = "norm" in name.lower() and name.endswith("weight")
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise + 1.0 if is_norm else noise)
    found.zero_grad()
    return found


def batch(length: int, padded: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, segment ids and attention mask [3, length]; the ids avoid every padding id in use."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(10, VOCABULARY, (3, length), generator=generator)
    segments = (torch.arange(length) > length // 2).long().expand(3, length).clone()
    mask = torch.ones(3, length, dtype=torch.long)
    if padded:
        mask[1, length // 2 :] = 0
        mask[2, -1] = 0
    return ids, segments, mask
