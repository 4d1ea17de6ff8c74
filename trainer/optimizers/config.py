"""The `optimizer` section of a learner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from configs.rules import PROBABILITY, Doc, Length, OneOf, Range, positive
from configs.section import Refusal, Section

# The default epsilon of each kind.
EPSILONS = {"adamw": 1e-8, "lamb": 1e-6, "adamax": 1e-8, "adadelta": 1e-6}
CORRECTED = ("adamw", "adamax")  # kinds that correct the bias of their moments


@dataclass
class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) or one of three others.

    LAMB (You et al., arXiv 1904.00962), Adamax (Kingma and Ba, arXiv 1412.6980) and Adadelta
    (Zeiler, arXiv 1212.5701).
    """

    kind: Annotated[
        str,
        OneOf(*EPSILONS),
        Doc(
            "The optimizer. A run may resume with another one; from or to adamax or adadelta it "
            "begins with fresh moments."
        ),
    ] = "adamw"
    learning_rate: Annotated[
        float, positive(1e6), Doc("The peak learning rate, which `schedule` scales.")
    ] = 1e-4
    betas: Annotated[
        list[float],
        Length(2),
        PROBABILITY,
        Doc(
            "Decay rates of the first and second moment, per step. adamax: of the first moment and "
            "of the largest gradient; adadelta: the second is that of both its averages."
        ),
    ] = field(default_factory=lambda: [0.9, 0.999])
    epsilon: Annotated[
        float | None,
        positive(1.0),
        Doc(
            "Added to the square root of the second moment (adamax: to the size of a gradient; "
            "adadelta: below both roots); null: 1e-8 for adamw and adamax, 1e-6 for the others."
        ),
    ] = None
    weight_decay: Annotated[
        float, Range(0, 100), Doc("Decoupled weight decay of weight matrices and embeddings.")
    ] = 0.01
    bias_correction: Annotated[
        bool | None,
        Doc(
            "Correct the bias of the moments; null: yes for adamw and adamax, no for the others. "
            "`false` makes adamw the Adam of BERT's code."
        ),
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if self.kind not in CORRECTED and self.bias_correction:
            yield "bias_correction", f"{self.kind} has no bias correction; remove it"
        if self.kind == "adamax" and self.bias_correction is False:
            yield "bias_correction", "adamax always corrects the bias of its moments; remove it"

    @property
    def resolved_epsilon(self) -> float:
        """`epsilon`, or the default of the kind of optimizer."""
        return EPSILONS[self.kind] if self.epsilon is None else self.epsilon

    @property
    def corrects_bias(self) -> bool:
        """`bias_correction`, or the default of the kind of optimizer."""
        return self.kind in CORRECTED if self.bias_correction is None else self.bias_correction
