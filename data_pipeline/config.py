"""The `data:` section of a job: what is read, how it is packed and masked."""

from __future__ import annotations

from dataclasses import dataclass, field

PACKINGS = (
    "full_sentences",
    "contiguous",
    "doc_sentences",
    "segment_pair",
    "sentence_pair",
    "sop",
)
PAIR_PACKINGS = ("segment_pair", "sentence_pair", "sop")


@dataclass
class MaskingConfig:
    """How positions are chosen for masked-language modelling and what they become.

    Of the chosen positions `mask_share` become the mask token, `random_share` a random ordinary
    token, and the rest stay as they are.
    """

    rate: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1

    def __post_init__(self) -> None:
        _require(0.0 <= self.rate <= 1.0, "rate", "must lie between 0 and 1")
        _require(self.mask_share >= 0.0, "mask_share", "must not be negative")
        _require(self.random_share >= 0.0, "random_share", "must not be negative")
        _require(
            self.mask_share + self.random_share <= 1.0 + 1e-9,
            "random_share",
            "mask_share and random_share together must not exceed 1",
        )


@dataclass
class DataConfig:
    """A corpus folder (`tandem data build`) and how its documents become training sequences."""

    path: str = "???"
    sequence_length: int = 128
    packing: str = "full_sentences"
    masking: MaskingConfig = field(default_factory=MaskingConfig)

    def __post_init__(self) -> None:
        _require(
            8 <= self.sequence_length <= 1 << 15, "sequence_length", "must lie between 8 and 32768"
        )
        _require(self.packing in PACKINGS, "packing", f"must be one of {', '.join(PACKINGS)}")


def _require(condition: bool, key: str, reason: str) -> None:
    if not condition:
        raise ValueError(f"{key}: {reason}")
