"""Task heads in the form of `transformers`: its classes, their tensors, and their labels."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from model.errors import ModelError
from model.model_config import may_name_a_head
from model.task_head_config import (
    CHOICE,
    CLASSIFICATION,
    DETECTION,
    LABELLED,
    MULTI_LABEL,
    REGRESSION,
    SPAN,
    TAGGING,
    VECTOR,
    TaskHeadConfig,
)

PROBLEMS = {  # kinds of one class of theirs, and their names for what it predicts
    CLASSIFICATION: "single_label_classification",
    MULTI_LABEL: "multi_label_classification",
    REGRESSION: "regression",
}
ENDINGS = {
    **dict.fromkeys(PROBLEMS, "ForSequenceClassification"),
    CHOICE: "ForMultipleChoice",
    TAGGING: "ForTokenClassification",
    SPAN: "ForQuestionAnswering",
    DETECTION: "ForPreTraining",
}
POOLINGS = {"cls": "first", "mean": "mean"}  # their names and ours
VECTOR_KEY = (
    "tandem_vector"  # the key of config.json that says how an encoder makes a text's vector
)


@dataclass(frozen=True)
class HeadForm:
    """How the class of an architecture makes its output; `pooling` and `transform` as in ours.

    rules: (pattern of our tensor's name inside the head, their name), as in `Family.rules`.
    chooses_pooling: the class reads ``classifier_pooling``, by which the mean can take the place of
    the first token.
    """

    pooling: str
    transform: str
    rules: tuple[tuple[str, str], ...]
    chooses_pooling: bool = False

    @property
    def weight(self) -> str:
        """Their name of the weight of the output layer."""
        return self.rules[0][1].replace(r"\1", "weight")


def linear(
    name: str, pooling: str = "", *, chooses_pooling: bool = False, **transforms: str
) -> HeadForm:
    """One dense layer of this name, after at most one transform: its kind and its name."""
    ((kind, prefix),) = transforms.items() or [("none", "")]
    rules = [(r"linear\.(.+)", rf"{name}.\1")]
    if kind == "norm":
        rules.append((r"transform\.(.+)", rf"{prefix}.\1"))
    elif kind != "none":
        rules.append((r"transform\.dense\.(.+)", rf"{prefix}.\1"))
    return HeadForm(pooling, kind, tuple(rules), chooses_pooling)


# ELECTRA's class reads it; other classes read the encoder alone, beside which it is written.
DETECTOR = linear(
    "discriminator_predictions.dense_prediction", gelu="discriminator_predictions.dense"
)


def read_task_heads(
    theirs: Mapping[str, Any], names: Collection[str], forms: Mapping[str, HeadForm]
) -> dict[str, TaskHeadConfig]:
    """The head of a fine-tuned model: of the kind that `architectures` says, if it has weights.

    `transformers` does not use the task's name; Tandem writes it as ``finetuning_task``. A vector
    head has no weights, and is written under a key of its own. A head without a form is left out
    (`unread_head`).
    """
    if VECTOR_KEY in theirs:
        name = _head_name(theirs, VECTOR)
        return {name: TaskHeadConfig(VECTOR, transform="none", **theirs[VECTOR_KEY])}
    kind = _kind(theirs, names)
    form = forms.get(kind)
    if form is None or form.weight not in names:
        return {}
    labels = _labels(theirs)
    ordered = [labels[number] for number in sorted(labels)] if kind in LABELLED else []
    pooling = form.pooling
    if form.chooses_pooling:
        pooling = POOLINGS[theirs.get("classifier_pooling", "cls")]
    head = TaskHeadConfig(kind, ordered, pooling, transform=form.transform)
    if kind == DETECTION:  # whose class has no dropout
        head = dataclasses.replace(head, dropout=0.0)
    return {_head_name(theirs, kind): head}


def unread_head(
    theirs: Mapping[str, Any], names: Collection[str], forms: Mapping[str, HeadForm]
) -> str:
    """A line about a fine-tuned model's head that `read_task_heads` leaves out; empty if none."""
    kind = _kind(theirs, names)
    if VECTOR_KEY in theirs or (kind in forms and forms[kind].weight in names):
        return ""
    if kind not in ("", DETECTION):
        what = theirs["architectures"][0]
        return f"{what}: its head has no counterpart here; the encoder alone is read"
    unread = sorted({form.weight for form in forms.values()}.intersection(names))
    why = "since architectures in config.json names no class that has it"
    return f"{unread[0]} is not read, {why}" if unread else ""


def _head_name(theirs: Mapping[str, Any], kind: str) -> str:
    """The task's name, with _ where a head can have no such character; its kind if it has none."""
    task = str(theirs.get("finetuning_task") or kind)
    names = (task, re.sub(r"\W", "_", task))
    return next((name for name in names if may_name_a_head(name)), kind)


def _labels(theirs: Mapping[str, Any]) -> dict[int, str]:
    """The labels by number. Of those without names a config.json may tell how many there are."""
    by_number = theirs.get("id2label") or _unnamed(theirs.get("num_labels", 2))
    return {int(number): str(label) for number, label in by_number.items()}


def _unnamed(count: int) -> dict[int, str]:
    return {number: f"LABEL_{number}" for number in range(count)}


def _kind(theirs: Mapping[str, Any], names: Collection[str]) -> str:
    if DETECTOR.weight in names:
        return DETECTION
    classes = theirs.get("architectures") or [""]
    kinds = [kind for kind, ending in ENDINGS.items() if str(classes[0]).endswith(ending)]
    if REGRESSION in kinds:
        if theirs.get("problem_type") == PROBLEMS[MULTI_LABEL]:
            return MULTI_LABEL
        outputs = len(_labels(theirs))
        if outputs > 1 and theirs.get("problem_type") == PROBLEMS[REGRESSION]:
            raise ModelError(f"problem_type: regression of {outputs} numbers is not supported")
        return REGRESSION if outputs == 1 else CLASSIFICATION
    return kinds[0] if kinds else ""


def write_vector_head(name: str, head: TaskHeadConfig) -> dict[str, Any] | None:
    """Keys of config.json for a vector that is a pooled state; None for a head with weights."""
    if not head.is_pooled_state:
        return None
    vector = {"pooling": head.pooling, "normalise": head.normalise}
    return {"finetuning_task": name, VECTOR_KEY: vector}


def write_task_head(name: str, head: TaskHeadConfig, form: HeadForm) -> dict[str, Any]:
    """The reverse of `read_task_heads`: keys of config.json."""
    count = 1 if head.kind in (REGRESSION, CHOICE) else 2
    labels = head.labels or list(_unnamed(count).values())
    theirs = {ours: name for name, ours in POOLINGS.items()}
    return {
        "finetuning_task": name,
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        **({"problem_type": PROBLEMS[head.kind]} if head.kind in PROBLEMS else {}),
        **({"classifier_pooling": theirs[head.pooling]} if form.chooses_pooling else {}),
    }


def in_form(head: TaskHeadConfig, form: HeadForm | None) -> TaskHeadConfig:
    """The head with what it leaves open: as in this form, or, without one, as simple as can be.

    A head that reads chosen layers has no counterpart in `transformers`.
    """
    pooling, transform = "" if head.module else "first", "none"
    if head.module is None and form is not None and not head.layers:
        pooling, transform = form.pooling, form.transform
    return dataclasses.replace(
        head,
        pooling="" if head.per_token else head.pooling or pooling,
        transform=head.transform or transform,
    )


def label_order(theirs: TaskHeadConfig, ours: TaskHeadConfig) -> list[int] | None:
    """The row of their output for each of our labels; None where their head does not fit ours.

    Labels that have no names in config.json (LABEL_0, LABEL_1, ...) are in our order.
    """
    if theirs.kind != ours.kind:
        return None
    labels = theirs.labels
    if theirs.is_unnamed and len(labels) == len(ours.labels):
        labels = ours.labels
    has_our_form = dataclasses.replace(theirs, labels=ours.labels) == ours
    if not has_our_form or sorted(labels) != sorted(ours.labels):
        return None
    return [labels.index(label) for label in ours.labels]
