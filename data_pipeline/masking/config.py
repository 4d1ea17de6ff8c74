"""The `data.masking` section: how many positions are predicted, and what the model sees there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from configs.rules import FRACTION, INDEX, OneOf, Range, Unit, positive
from configs.section import Refusal, Section

UNITS = ("token", "word", "ngram", NEXT_TOKEN := "next_token")


@dataclass
class MaskingConfig(Section):
    """How positions are chosen for masked-language modelling and what they become."""

    rate: Annotated[float, FRACTION, "Fraction of a sequence's ordinary tokens that is chosen."] = (
        0.15
    )
    final_rate: Annotated[
        float | None,
        FRACTION,
        "The rate changes linearly until it has this value at `final_rate_step`, and then "
        "stays constant.",
    ] = None
    final_rate_step: Annotated[
        int, INDEX, Unit("steps"), "The step at which `final_rate` is reached."
    ] = 0
    held_out_rate: Annotated[
        float | None,
        positive(1.0),
        "The rate at which held-out text is masked, so that runs of different rates can be "
        "compared; null: `final_rate`, or else `rate`.",
    ] = None
    unit: Annotated[
        str,
        OneOf(*UNITS),
        "What is chosen as a unit: a token, a whole word, or up to `max_ngram` whole words. "
        "next_token: nothing is masked; every token is predicted from those before it, which "
        "alone are attended to (causal language modelling).",
    ] = "token"
    max_ngram: Annotated[
        int,
        Range(1, 16),
        Unit("words"),
        "The longest n-gram; n has a probability proportional to 1/n, as in ALBERT.",
    ] = 3
    smoothing: Annotated[
        float,
        Range(0, 10),
        "Tokens are drawn in proportion to count**-smoothing (DistilBERT: 0.7); 0: all equally.",
    ] = 0.0
    copies: Annotated[
        int,
        Range(0, 2**31),
        "0: new masks in every epoch. k: each sequence takes turns with k fixed "
        "masks, and each pair with k fixed splits, partners and labels.",
    ] = 0
    on_device: Annotated[
        bool, "Make token masks on the device that trains. The masks are the same, to the bit."
    ] = False
    mask_fraction: Annotated[
        float, FRACTION, "Fraction of the chosen positions that becomes the mask token."
    ] = 0.8
    random_fraction: Annotated[
        float,
        FRACTION,
        "Fraction of the chosen positions that becomes a random ordinary token; the others "
        "are unchanged.",
    ] = 0.1

    def conflicts(self) -> Iterator[Refusal]:
        if self.final_rate is not None and self.final_rate_step == 0:
            yield "final_rate_step", "must be set to the step at which final_rate is reached"
        if self.final_rate is None and self.final_rate_step:
            yield "final_rate_step", "is for final_rate; set that too, or remove it"
        if self.unit != "ngram":
            for key in self.changed("max_ngram"):
                yield key, "is for unit: ngram; remove it"
        if self.smoothing and self.unit != "token":
            yield "smoothing", "needs unit: token"
        if self.on_device and (self.unit != "token" or self.smoothing):
            yield "on_device", "needs unit: token and smoothing: 0"
        if self.mask_fraction + self.random_fraction > 1.0 + 1e-9:
            yield "random_fraction", "together with mask_fraction it must not exceed 1"

    @property
    def is_causal(self) -> bool:
        """Whether tokens are predicted from those before them, and nothing is masked."""
        return self.unit == NEXT_TOKEN

    @property
    def thresholds(self) -> tuple[int, int]:
        """A chosen position is masked if its 32-bit draw is below the first.

        Otherwise it becomes a random token if its draw is below the second.
        """
        either = self.mask_fraction + self.random_fraction
        return round(self.mask_fraction * 2**32), round(either * 2**32)

    def rate_at(self, step: int) -> float:
        """The fraction of the ordinary tokens that is predicted at a step."""
        if self.final_rate is None or self.is_causal:
            return self.highest_rate
        progress = min(step / self.final_rate_step, 1.0)
        rate = self.rate + progress * (self.final_rate - self.rate)
        return min(rate, self.highest_rate)  # rounding may go beyond, and there are no slots then

    def for_held_out(self) -> MaskingConfig:
        """The masks of held-out text: at one rate, which is not 0 even where training has none."""
        rate = self.held_out_rate or self.final_rate or self.rate or MaskingConfig().rate
        return dataclasses.replace(self, rate=rate, final_rate=None, final_rate_step=0)

    @property
    def highest_rate(self) -> float:
        """The highest rate of any step."""
        if self.is_causal:
            return 1.0
        return self.rate if self.final_rate is None else max(self.rate, self.final_rate)

    def slots(self, length: int) -> int:
        """The most positions that are predicted in a sequence of `length` tokens."""
        if self.is_causal:
            return length - 1
        return _slots(self.highest_rate, length)

    def without_slots(self, length: int) -> Iterator[Refusal]:
        """The rates that are meant to mask, but choose nothing in a sequence of `length` tokens."""
        for key in ("rate", "final_rate", "held_out_rate"):
            rate = getattr(self, key)
            if rate and not _slots(rate, length):
                yield key, f"{rate:g} masks no token of sequences of {length}; raise it"


def _slots(rate: float, length: int) -> int:
    return round(rate * (length - 2))  # [CLS] and [SEP] are never chosen
