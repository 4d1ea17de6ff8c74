"""The labels of a task: those in its training file, and their weights in the loss."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from configs.errors import ConfigError
from configs.rules import WEIGHT, Doc
from configs.typed import convert
from data_pipeline import DataError
from trainer.objectives.task import LABEL, TaskFile

MISSING = ("nan", "<na>")  # labels that other programs write where there is none
_NUMBER = re.compile(r"[+-]?\d{1,15}(?:\.\d+)?")
UNKNOWN_LABELS = ["0", "1"]  # placeholder labels of a head, until the training file is read
ClassWeights = Annotated[
    dict[str, Annotated[float, WEIGHT]],
    Doc(
        "The weight of each label in the loss; a label that is not named has 1. The loss "
        "is divided by the sum of its examples' weights, as torch's CrossEntropyLoss "
        "does."
    ),
]


def weights_of(labels: Sequence[str], named: Mapping[str, float]) -> list[float]:
    """The weight of each label; none where all are 1."""
    return [named.get(label, 1.0) for label in labels if named]


def unknown_weights(labels: Sequence[str], named: Mapping[str, float]) -> str:
    """The fault of weights for labels other than these; empty without one."""
    unknown = ", ".join(sorted(named.keys() - set(labels)))
    return f"{unknown} is none of the labels: {', '.join(labels)}" if unknown else ""


def labels_among(file: TaskFile, rows: Iterable[tuple[str, str]]) -> list[str]:
    """The different labels in a training file, sorted. `rows`: (place, label) of each example.

    Numbers are in the order of numbers. Raises DataError for a label that is missing or that a
    config cannot hold, for one number in two forms, and for fewer than two labels.
    """
    places: dict[str, str] = {}
    for place, label in rows:
        places.setdefault(label, place)
    for label, place in places.items():
        if not label or label.lower() in MISSING:
            why = f"is {label or 'empty'}; give one, or set unlabelled: true"
            raise DataError(f"{place}: {LABEL}: {why}")
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
    return _in_order(places)


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
