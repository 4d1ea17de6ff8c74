"""The `phases` of a job's data: everything that changes at a later step."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from configs.rules import COUNT, FRACTION, ROWS, OneKeyOf, OneOf, Range, Unit, positive
from configs.section import Refusal, Section
from data_pipeline.masking.config import NEXT_TOKEN, UNITS, MaskingConfig
from data_pipeline.packing.kinds import PACKINGS

LENGTHS = Range(8, 2**15)
WEIGHT_OF_CORPUS = Range(0, 1e9)


@dataclass
class PhaseMaskingConfig(Section):
    """The keys of `masking` that a phase changes; null: as before."""

    rate: Annotated[
        float | None,
        FRACTION,
        "The rate of the phase; `final_rate` has no effect during the phase.",
    ] = None
    unit: Annotated[str | None, OneOf(*UNITS), "What is chosen as one."] = None
    mask_fraction: Annotated[
        float | None, FRACTION, "Fraction of the chosen positions that is masked."
    ] = None
    random_fraction: Annotated[
        float | None, FRACTION, "Fraction that becomes a random ordinary token."
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if not any(self.changed(*vars(self))):
            yield "rate", "nothing changes; set this or another key, or remove masking"
        if self.unit == NEXT_TOKEN:
            for key in self.changed("rate", "mask_fraction", "random_fraction"):
                yield key, "is for masks; set it in a phase that has them"

    def applied_to(self, masking: MaskingConfig) -> MaskingConfig:
        """The masking of the phase. Raises ValueError where the keys contradict each other."""
        changes = {key: value for key, value in vars(self).items() if value is not None}
        if self.rate is not None:
            changes |= {"final_rate": None, "final_rate_step": 0}
        return dataclasses.replace(masking, **changes)


@dataclass
class PhaseConfig(Section):
    """The keys that change from a step on; a key that is null keeps its value."""

    from_step: Annotated[int, COUNT, Unit("steps"), "The first step of the phase."]
    sequence_length: Annotated[
        int | None, LENGTHS, Unit("tokens"), "Its sequence length; null: as before."
    ] = None
    packing: Annotated[str | None, OneKeyOf(PACKINGS), "Its packing; null: as before."] = None
    mixture: Annotated[
        dict[str, float],
        WEIGHT_OF_CORPUS,
        "Weights of corpora of `mixture`; the others keep theirs. 0: not read in the phase.",
    ] = field(default_factory=dict)
    masking: PhaseMaskingConfig | None = None
    batch: Annotated[
        int | None, ROWS, Unit("sequences"), "Its global batch; null: as `batch` says."
    ] = None
    rope_theta: Annotated[
        float | None,
        positive(1e12),
        "The base of the rotary positions of the global layers of all learners that are "
        "trained; null: as before, at first each model's `global_rope_theta`.",
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if not any(self.changed(*vars(self).keys() - {"from_step"})):
            yield "from_step", "nothing changes here; set another key, or remove the phase"

    @property
    def begins_pass(self) -> bool:
        """Whether other sequences are read, in a new pass over the corpora."""
        return bool(self.sequence_length or self.packing or self.mixture)
