"""Parameter counts of every shipped config, and FLOPs against torch's counter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import configs
import model
from model.accounting import describe, flops_per_token
from tests.model.chunked import chunked_cross_entropy

torch.set_num_threads(1)

PUBLISHED = {
    "bert_base": 109_482_240,
    "bert_large": 335_141_888,
    "roberta_base": 124_645_632,
    "distilbert": 66_362_880,
    "albert_base": 11_683_584,
    "albert_large": 17_683_968,
    "albert_xlarge": 58_724_864,
    "albert_xxlarge": 222_595_584,
    "albert_base_e64": 9_681_408,
    "albert_base_e256": 15_687_936,
    "albert_base_e768": 31_114_752,
    "electra_small": 13_483_008,
    "mobilebert": 24_581_888,
    "ib_bert_large": 294_467_840,
    "tinybert_4": 14_350_248,
    "tinybert_6": 66_955_008,
    "modernbert_base": 149_014_272,
    "eurobert_210m": 211_766_016,
    "neobert": 221_665_536,
    "modernbert_large": 394_781_696,
    "deberta_v3_base": 183_831_552,
    "deberta_v3_small": 141_304_320,
    "ettin_17m": 16_797_440,
    "ettin_32m": 31_883_136,
    "ettin_68m": 68_144_640,
    "bert_tiny": 4_385_920,
    "bert_mini": 11_170_560,
    "bert_small": 28_763_648,
    "bert_medium": 41_373_184,
}
ROUNDED = {  # (sharing, embedding size): millions, as in the paper
    ("none", 64): 87,
    ("none", 128): 89,
    ("none", 256): 93,
    ("none", 768): 108,
    ("attention", 128): 64,
    ("ffn", 128): 38,
    ("attention", 768): 83,
    ("ffn", 768): 57,
}


def load(name: str, *overrides: str) -> model.EncoderConfig:
    return configs.load(name, model.EncoderConfig, "model", list(overrides))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert describe(load(name)).parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "override", "parameters"),
    [
        ("albert_base_e768", "embedding_projection=sum", 31_705_344),
        ("mobilebert", "pooler=tanh", 24_844_544),
    ],
)
def test_what_only_the_classes_of_transformers_have_is_counted_too(
    name: str, override: str, parameters: int
) -> None:
    assert describe(load(name, override)).parameters == parameters


@pytest.mark.parametrize(("sharing", "width"), ROUNDED)
def test_albert_variants_round_to_the_paper(sharing: str, width: int) -> None:
    # Some of the paper's figures fit the count with the pooler, some the one without.
    overrides = [f"sharing={sharing}", f"embedding_size={width}"]
    if width == 768:
        overrides.append("embedding_projection=none")
    least, most = (
        describe(load("albert_base", *overrides, f"pooler={pooler}")).parameters / 1e6
        for pooler in ("none", "tanh")
    )
    assert least - 0.5 <= ROUNDED[sharing, width] <= most + 0.5


def test_every_shipped_configuration_loads() -> None:
    folder = Path(configs.__file__).parent / "model"
    for path in folder.glob("*.yaml"):
        config = configs.load(path.stem, model.ModelConfig, "model")  # type: ignore[type-abstract]
        size = describe(config)
        assert size.bytes == 4 * (size.parameters + size.head_parameters)


@pytest.mark.parametrize(
    "name",
    [
        *("bert_tiny", "albert_base", "mobilebert", "ib_bert_large", "modernbert_base"),
        *("distilbert", "eurobert_210m", "deberta_v3_base"),
    ],
)
def test_the_flops_formula_equals_what_torch_counts(name: str) -> None:
    small = ["vocab_size=97", "hidden_size=32", "layers=3", "heads=2", "ffn_size=48"]
    small += ["max_positions=40", "pad_token_id=0", "dropout=0", "attention_dropout=0"]
    if load(name).bottleneck_size:
        small += ["bottleneck_size=16", "embedding_size=8", "pair_head=true"]
    if load(name).positions == "relative":
        small += ["position_buckets=8"]
    if load(name).norm == "rms_norm":
        small += ["kv_heads=1"]
    config = load(name, *small)
    ours = model.build(config, seed=0)
    rows, length, masked = 2, 20, 6
    ids = torch.randint(0, 97, (rows, length))
    positions = torch.arange(masked)
    with FlopCounterMode(display=False) as counter:
        whole = model.Capture(last_hidden_state=True)  # as a teacher
        found = ours.features(ids, masked_positions=positions, capture=whole)
        loss, _ = chunked_cross_entropy(
            found.vocabulary_input, *ours.output_projection(), positions
        )
        for extra in (found.pooled, found.heads.get("pairs")):
            loss = loss if extra is None else loss + extra.sum()
        loss.backward()
    per_token = 3 * flops_per_token(config, length, masked / (rows * length))
    of_distances = 3 * 3 * 2 * 2 * config.distances * 32 * 32  # of a batch, whatever its size
    extra = of_distances if config.positions == "relative" else 0
    assert counter.get_total_flops() == round(per_token * rows * length) + extra
