"""Self-distillation: the branches of a task's head learn from that of the last layer (FastBERT)."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor
from torch.nn import functional as F

from configs.rules import OneOf
from configs.section import Refusal
from model import CLASSIFICATION, Ability, Capture, ModelConfig, ModelShape, with_task_head
from trainer.denominators import ROWS
from trainer.learner_names import OWN
from trainer.objectives.stages import BRANCHES
from trainer.objectives.task import HeadTerm, HeadTermConfig
from trainer.objectives.term import LAST, LossInputs, Term, register

FORWARD, REVERSE = "forward", "reverse"


@register("branches", order=LAST + 1)  # after the tasks, whose heads they are made of
@dataclass
class Branches(HeadTermConfig):
    """The task's head becomes a classifier after every layer; the last one teaches the others.

    The sum over the other layers of the KL divergence between both predictions, of every example,
    labelled or not (FastBERT, arXiv 2004.02178, section 3.2). Branches never train the layers.
    """

    divergence: Annotated[
        str,
        OneOf(FORWARD, REVERSE),
        "forward: KL(last || branch), as the original's code; reverse: KL(branch || last), as "
        "its paper.",
    ] = FORWARD

    needs: ClassVar[tuple[Ability, ...]] = (Ability.TASK_HEAD, Ability.LEAVE_EARLY)
    compares: ClassVar[str] = BRANCHES
    source: ClassVar[str] = OWN
    reads_states: ClassVar[bool] = False

    def unequippable(self, model: ModelConfig) -> Iterator[str]:
        yield from super().unequippable(model)
        head = model.task_heads.get(self.head)
        if head is not None and head.kind != CLASSIFICATION:
            yield f"is for tasks with classes, and {self.head} has a head of kind {head.kind}"
        if head is not None and head.layers:
            yield f"reads every layer; remove layers of {self.head}"
        if head is not None and head.numbers:
            yield f"reads no numbers beside the text; remove numbers of {self.head}"

    def equip(self, model: ModelConfig) -> ModelConfig:
        head = model.task_heads.get(self.head)
        if head is None:
            return model
        branched = dataclasses.replace(head, branches=True, pooling="first", transform="none")
        return with_task_head(model, self.head, branched)

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        if student.layers < 2:
            yield "", "needs a model of two layers or more"

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return BranchesTerm(self)


class BranchesTerm(HeadTerm):
    denominator = ROWS

    def __init__(self, config: Branches) -> None:
        super().__init__(config)
        self.is_reverse = config.divergence == REVERSE

    def student_capture(self, step: int) -> Capture:
        return Capture(heads=(self.head,), branches=(self.head,))

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        (last,) = self.outputs(inputs).heads[self.head]
        weights = inputs.batch.attention_mask[:, 0].float()
        branches = inputs.features.branches[self.head]
        return branch_divergence(branches, last, weights, reverse=self.is_reverse)


def branch_divergence(
    branches: Tensor, last: Tensor, weights: Tensor, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The sum over branches of KL(last || branch), or with `reverse` of KL(branch || last).

    FastBERT, arXiv 2004.02178, eq. 8 and 9; the order of its code and that of its paper.
    branches: logits [branches, B, K]; last: logits [B, K]; weights: [B], 0 where a row does not
    count. Count: the sum of the weights.
    """
    ours = F.log_softmax(branches.float(), dim=-1)
    theirs = F.log_softmax(last.float(), dim=-1).expand_as(ours)
    said, target = (theirs, ours) if reverse else (ours, theirs)
    losses = F.kl_div(said, target, reduction="none", log_target=True).sum(dim=-1)
    return (losses * weights).sum(), weights.sum()
