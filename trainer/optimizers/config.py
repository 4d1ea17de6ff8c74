"""The `optimizer` section of a learner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from configs.rules import PROBABILITY, Doc, Length, OneOf, Range, positive
from configs.section import Refusal, Section

# The default epsilon of each kind.
EPSILONS = {"adamw": 1e-8, "lamb": 1e-6}


@dataclass
class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) or LAMB (You et al., arXiv 1904.00962)."""

    kind: Annotated[str, OneOf(*EPSILONS), Doc("The optimizer.")] = "adamw"
    learning_rate: Annotated[
        float, positive(1e6), Doc("The peak learning rate, which `schedule` scales.")
    ] = 1e-4
    betas: Annotated[
        list[float],
        Length(2),
        PROBABILITY,
        Doc("Decay rates of the first and second moment, per step."),
    ] = field(default_factory=lambda: [0.9, 0.999])
    epsilon: Annotated[
        float | None,
        positive(1.0),
        Doc("Added to the square root of the second moment; null: 1e-8 for adamw, 1e-6 for lamb."),
    ] = None
    weight_decay: Annotated[
        float, Range(0, 100), Doc("Decoupled weight decay of weight matrices and embeddings.")
    ] = 0.01
    bias_correction: Annotated[
        bool | None,
        Doc(
            "Correct the bias of the moments; null: yes for adamw, no for lamb. `false` makes "
            "adamw the Adam of BERT's code."
        ),
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if self.kind == "lamb" and self.bias_correction:
            yield "bias_correction", "lamb has no bias correction; remove it"

    @property
    def resolved_epsilon(self) -> float:
        """`epsilon`, or the default of the kind of optimizer."""
        return EPSILONS[self.kind] if self.epsilon is None else self.epsilon

    @property
    def corrects_bias(self) -> bool:
        """`bias_correction`, or the default of the kind of optimizer."""
        return self.kind == "adamw" if self.bias_correction is None else self.bias_correction
