"""The labels of a task, and losses of labels, also those of pairs of segments.

A loss is a pure function that returns (sum, count). The objective divides by the count summed over
all ranks and micro-batches. Sums are float32 scalars. Shapes: B rows, K classes.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from configs.errors import ConfigError
from configs.rules import WEIGHT
from configs.typed import convert
from data_pipeline import NO_LABEL, PAIRS, DataError
from data_pipeline.packing.kinds import PACKINGS
from model import Ability, Capture, ModelConfig, ModelShape
from trainer.objectives.task import LABEL, TaskFile
from trainer.objectives.term import LossInputs, Term, TermConfig

MISSING = ("nan", "<na>", "-100")  # labels that other programs write where there is none
_NUMBER = re.compile(r"[+-]?\d{1,15}(?:\.\d+)?")
UNKNOWN_LABELS = ["0", "1"]  # placeholder labels of a head, until the training file is read
ClassWeights = Annotated[
    dict[str, Annotated[float, WEIGHT]],
    "The weight of each label in the loss; a label that is not named has 1. The loss "
    "is divided by the sum of its examples' weights, as torch's CrossEntropyLoss "
    "does.",
]


def weights_of(labels: Sequence[str], named: Mapping[str, float]) -> list[float]:
    """The weight of each label; none where all are 1."""
    return [named.get(label, 1.0) for label in labels if named]


def wrong_weights(labels: Sequence[str], named: Mapping[str, float]) -> str:
    """The fault of weights of other labels than these, or of none that counts; else empty."""
    if unknown := ", ".join(sorted(named.keys() - set(labels))):
        return f"{unknown} is none of the labels: {', '.join(labels)}"
    return "" if any(named.get(label, 1.0) for label in labels) else "must not be 0 for all labels"


def labels_by_number(names: Sequence[str], labels: Sequence[str]) -> dict[str, str]:
    """The label that each whole number in a column stands for, by the column's `class_names`.

    Empty where these are none, and where the task's `labels` are none of these: those of a model
    may be the numbers themselves.
    """
    if labels and set(labels).isdisjoint(names):
        return {}
    return {str(number): name for number, name in enumerate(names)}


def advice_on(label: str, labels: Sequence[str]) -> str:
    """Advice about a label in a file that is none of these; empty unless it is a number."""
    if not re.fullmatch(r"-?\d+", label):
        return ""
    if label.startswith("-"):
        return "; remove such rows, or, in a task of texts, name it in ignored_labels"
    if any(map(_NUMBER.fullmatch, labels)):
        return ""
    return "; write names for numbers, or use Parquet of `datasets`, which has those of ClassLabels"


def labels_among(
    file: TaskFile,
    rows: Iterable[tuple[str, str]],
    declared: Sequence[str] = (),
    remedy: str = "give one",
) -> list[str]:
    """The different labels in a training file, sorted. `rows`: (place, label) of each example.

    Numbers are in the order of numbers. Those `declared` by the file are all labels, in its order.
    `remedy`: what to do where a label is missing.
    Raises DataError for a label that is missing or that a config cannot hold, for one number in
    two forms, for fewer than two labels, and for one that is not declared.
    """
    places: dict[str, str] = {}
    for place, label in rows:
        places.setdefault(label, place)
    for label, place in places.items():
        if not label or label.lower() in MISSING:
            raise DataError(f"{place}: {LABEL}: is {label or 'empty'}; {remedy}")
        try:
            convert(label, str, LABEL)
        except ConfigError:
            why = "is a placeholder or has a control character; give it another name"
            raise DataError(f"{place}: {LABEL}: {label!r} {why}") from None
    if len(places) < 2:
        listed = ", ".join(map(repr, places)) or "none"
        raise DataError(
            f"{file.path}: has only one label, {listed}; a task needs two; if another column holds "
            "them, name it in data.columns"
        )
    for label, place in places.items():
        if declared and label not in declared:
            why = f"is not one of the labels: {', '.join(declared)}{advice_on(label, declared)}"
            raise DataError(f"{place}: {LABEL}: {label!r} {why}")
    return [*declared] or _in_order(places)


def _in_order(places: Mapping[str, str]) -> list[str]:
    """Labels sorted; numbers by their value. `places`: where each label comes first."""
    values: dict[float, str] = {}
    for label, place in places.items():
        if not _NUMBER.fullmatch(label):
            return sorted(places)
        other = values.setdefault(float(label), label)
        if other != label:
            raise DataError(f"{place}: {LABEL}: {label} is {other} elsewhere; write them alike")
    return [values[value] for value in sorted(values)]


def are_measures(labels: Sequence[str]) -> bool:
    """Whether all labels are numbers, also with a decimal comma, and some are not whole."""
    numbers = [label.replace(",", ".") for label in labels]
    return all(map(_NUMBER.fullmatch, numbers)) and any(float(number) % 1 for number in numbers)


def label_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Sequence[float] = ()
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of one class per row.

    For classifiers, next-sentence prediction (BERT, arXiv 1810.04805; label 0: the segment follows)
    and sentence-order prediction (ALBERT, arXiv 1909.11942; label 0: the right order).

    logits: [B, classes]; labels: [B] int64, -100 where a row has none; weights: of each class,
    none: all 1. Count: labelled rows, or the sum of their weights, as in torch's CrossEntropyLoss.
    """
    of_class = _of_each(weights, logits) if weights else None
    loss = F.cross_entropy(logits.float(), labels, of_class, ignore_index=NO_LABEL, reduction="sum")
    is_labelled = labels != NO_LABEL
    if of_class is None:
        return loss, is_labelled.sum()
    return loss, (of_class[labels.clamp(min=0)] * is_labelled).sum()


def binary_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Sequence[float] = ()
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of labels that are right (1) or wrong (0), each by itself.

    logits: [B, K]; labels: [B, K] int64, -100 where a row has none; weights: of each label, if any.
    Count: decisions, as torch's BCEWithLogitsLoss has it, or the sum of their weights.
    """
    decisions = (labels != NO_LABEL).expand(logits.shape).float()
    if weights:
        decisions = decisions * _of_each(weights, logits)
    right = labels.clamp(min=0).expand(logits.shape).float()
    loss = F.binary_cross_entropy_with_logits(logits.float(), right, decisions, reduction="sum")
    return loss, decisions.sum()


def _of_each(weights: Sequence[float], logits: Tensor) -> Tensor:
    """Float32, also of narrower logits: the loss is divided by the sum of the exact weights."""
    return torch.tensor(weights, dtype=torch.float32).to(logits.device, non_blocking=True)


def squared_error(predictions: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of one predicted number per example.

    predictions: [B, 1]; numbers: [B] float32, NaN where an example has none. Count: numbers.
    """
    has_number = ~numbers.isnan()
    error = predictions.float()[:, 0] - torch.where(has_number, numbers, 0.0)
    return (error.square() * has_number).sum(), has_number.sum()


@dataclass
class PairConfig(TermConfig):
    """The YAML section of a pair term: the learner gets a pair head, which needs a pooler."""

    needs: ClassVar[tuple[Ability, ...]] = (Ability.POOL,)
    packings: ClassVar[tuple[str, ...]]  # values of `data.packing` whose pair labels it is about

    @property
    def head(self) -> str | None:
        return PAIRS

    @property
    def reads_all_positions(self) -> bool:
        return True

    def equip(self, model: ModelConfig) -> ModelConfig:
        return model.with_pair_head()

    def refusals(self, packings: Collection[str], masked: bool) -> Iterator[str]:
        wrong = [
            packing
            for packing in packings
            if PACKINGS[packing].pair_labels and packing not in self.packings
        ]
        if wrong or not set(packings) & set(self.packings):
            named = ", ".join(wrong or packings)
            yield (f"data.packing {named} has no such pairs; it takes {' or '.join(self.packings)}")

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return PairTerm(self)


class PairTerm(Term):
    """Cross-entropy over two classes; what they mean depends on the packing."""

    denominator = PAIRS

    def student_capture(self, step: int) -> Capture:
        return Capture(last_hidden_state=True)

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        logits, labels = inputs.features.heads[PAIRS], inputs.batch.row_labels(PAIRS)
        if PAIRS not in inputs.batch.targets:  # a row may then hold several texts
            labels = labels.new_full(logits.shape[:1], NO_LABEL)
        return label_cross_entropy(logits, labels)
