"""The declaration of a head that a task adds to an encoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, TypeVar

import torch
from torch import nn

from configs.kinds import add_kind
from configs.rules import PROBABILITY, OneOf, Range
from configs.section import Refusal, Section

CLASSIFICATION, REGRESSION, CHOICE = "classification", "regression", "choice"
TAGGING, SPAN, VECTOR = "tagging", "span", "vector"
MULTI_LABEL, DETECTION, OTHER = "multi_label", "detection", "other"
KINDS = (
    *(CLASSIFICATION, MULTI_LABEL, REGRESSION, CHOICE),
    *(TAGGING, SPAN, DETECTION, VECTOR, OTHER),
)
PER_TOKEN = (TAGGING, SPAN, DETECTION)  # the others have one output per text
ONE_OF_LABELS = (CLASSIFICATION, TAGGING)
LABELLED = (*ONE_OF_LABELS, MULTI_LABEL, OTHER)
WIDEST = 2**24  # no machine could hold a larger model
HEAD_KIND = "The module of the head."
_Config = TypeVar("_Config", bound="type[HeadModuleConfig]")


@dataclass
class HeadModuleConfig(Section, ABC):
    """The module of a head: `kind` names it, and decides which other keys there are.

    It is a module of `model.head_modules`, or a file of `plugins:`, that `register_head` decorates.
    """

    pools: ClassVar[bool] = False  # whether it has one output for a text, and none for each token

    kind: Annotated[str, HEAD_KIND] = "attention_pooling"

    @abstractmethod
    def build(self, size: int, outputs: int) -> nn.Module:
        """A module that is called with states [B, L, size] and a mask, bool [B, L].

        It is true at tokens; None: nothing is padded. Returns [B, outputs], or [B, L, outputs] for
        a head with an output at every token.
        """

    def flops(self, size: int, outputs: int, length: int) -> int:
        """FLOPs for a text of this length; here two for each weight of a matrix and token."""
        with torch.device("meta"):
            module = self.build(size, outputs)
        weights = sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)
        return 2 * weights * length


def register_head(config: _Config) -> _Config:
    """A decorator: `module.kind` of a task, or of a head, may be this config's.

    Raises TypeError as `configs.kinds.require_new`.
    """
    return add_kind(HeadModuleConfig, config)


@dataclass
class TaskHeadConfig(Section):
    """A head: what it reads from the encoder, and what it computes.

    If `pooling` and `transform` are empty, `model.with_task_head` chooses them so that the head
    equals the head that `transformers` has for the architecture.
    """

    kind: Annotated[
        str,
        OneOf(*KINDS),
        "Its output, which decides what `tandem predict` prints and what is exported. "
        "classification: a logit per label, one of which is right; multi_label: a logit per "
        "label, each right or not by itself; regression: a number; choice: the score of a text "
        "among several; tagging: a logit per label at every token; span: two logits at every "
        "token, of the first and the last of the answer; detection: a logit at every token, of "
        "whether it was replaced; vector: a vector; other: a number per "
        "label, which only its task can read.",
    ] = CLASSIFICATION
    labels: Annotated[
        list[str], "The names of the classes or tags, in the order of the logits."
    ] = field(default_factory=list)
    pooling: Annotated[
        str,
        OneOf("", "pooler", "first", "mean"),
        "What a head with one output per text reads: the model's pooler, the state of the "
        "first token, or the mean over the tokens; empty: as `transformers` does.",
    ] = ""
    layers: Annotated[
        list[int],
        Range(-4097, 4096),
        "The hidden states that it reads, concatenated: 0 is the embedding output, 1 the "
        "output of the first layer, -1 of the last; empty: the last.",
    ] = field(default_factory=list)
    transform: Annotated[
        str,
        OneOf("", "none", "tanh", "relu", "gelu", "norm"),
        "A dense layer before the output, with tanh, relu or gelu; norm: with the activation "
        "and norm of the masked-LM transform; empty: as `transformers` does.",
    ] = ""
    activation: Annotated[
        str, OneOf("", "relu"), "The activation before the output layer; TinyBERT's code has relu."
    ] = ""
    numbers: Annotated[
        list[str],
        "The columns of a table whose numbers its output layer reads beside the pooled state.",
    ] = field(default_factory=list)
    means: Annotated[
        list[float], "The mean of each of `numbers` in training, which is subtracted."
    ] = field(default_factory=list, compare=False)
    deviations: Annotated[
        list[float], "The standard deviation of each in training, by which it is divided."
    ] = field(default_factory=list, compare=False)
    size: Annotated[
        int, Range(0, WIDEST), "Width of a vector; 0: the width of its input, without a projection."
    ] = 0
    normalise: Annotated[bool, "Scale a vector to length 1."] = False
    crf: Annotated[
        bool, "A conditional random field over the tags: weights for each pair of neighbours."
    ] = False

    dropout: Annotated[
        float | None,
        PROBABILITY,
        "Dropout probability of the input of its last layer; null: the model's dropout.",
    ] = field(default=None, compare=False)
    branches: Annotated[
        bool,
        "A classifier of FastBERT's form after every layer: a dense layer to 128 with tanh, "
        "self-attention of 2 heads, the first token, a dense layer with tanh. Examples can "
        "then leave at any layer; the last layer's gives the output.",
    ] = False

    module: Annotated[
        HeadModuleConfig | None,
        "The module of the head, which reads the states of all tokens and gives the "
        "output; null: a pooled state, a transform and an output layer.",
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        fewest, labels = (2, "two labels") if self.kind in ONE_OF_LABELS else (1, "one label")
        if self.kind in LABELLED and len(set(self.labels)) < max(fewest, len(self.labels)):
            yield "labels", f"must name at least {labels}, each once"
        if self.kind not in LABELLED and self.labels:
            yield "labels", f"a head of kind {self.kind} has none; remove them"
        if self.crf and self.kind != TAGGING:
            yield "crf", "is for kind: tagging"
        if self.kind != VECTOR and (self.size or self.normalise):
            yield "size" if self.size else "normalise", "is for kind: vector"
        if self.per_token and self.pooling:
            yield "pooling", f"a head of kind {self.kind} reads every token; remove it"
        if self.pooling == "pooler" and self.layers:
            yield "pooling", "must be first or mean where layers are chosen"
        if self.activation and (self.branches or not self.outputs):
            yield "activation", "is for a head of one output layer; remove it"
        if self.numbers and (self.per_token or self.branches or not self.outputs):
            yield "numbers", "are for a head of one output layer on a pooled state; remove them"
        yield from conflicts_of_numbers(self.numbers, self.means, self.deviations)
        if self.module is not None:
            yield from self._conflicts_of_module()
        if self.branches:
            yield from self._conflicts_of_branches()

    def _conflicts_of_module(self) -> Iterator[Refusal]:
        if self.branches or self.activation or self.numbers:
            key = "branches" if self.branches else "activation" if self.activation else "numbers"
            yield key, "is for a head without a module; remove it"
        if not self.outputs:
            yield "size", "must be set if the head has a module"
        if self.per_token and self.module is not None and self.module.pools:
            why = f"{self.module.kind} has no output for each token, as kind: {self.kind} needs"
            yield "module", f"{why}; remove it"

    def _conflicts_of_branches(self) -> Iterator[Refusal]:
        if self.kind != CLASSIFICATION:
            yield "branches", "are for kind: classification"
        if self.layers:
            yield "layers", "branches read one layer each; remove it"
        for key, only in (("pooling", "first"), ("transform", "none")):
            if getattr(self, key) != only:
                yield key, f"must be {only} where branches is true"

    @property
    def is_pooled_state(self) -> bool:
        """Whether its output is a vector that is a pooled last state, without weights."""
        has_weights = self.size or self.layers or self.transform != "none"
        return self.kind == VECTOR and not has_weights

    @property
    def is_unnamed(self) -> bool:
        """Whether the labels are those of a config.json that names none: LABEL_0, LABEL_1, ..."""
        numbers = range(len(self.labels))
        return bool(self.labels) and self.labels == [f"LABEL_{number}" for number in numbers]

    def tells_labels_of(self, other: TaskHeadConfig) -> bool:
        """Whether the labels are the other's, in any order, or as many without names."""
        is_by_order = self.is_unnamed and len(self.labels) == len(other.labels)
        return is_by_order or sorted(self.labels) == sorted(other.labels)

    @property
    def per_token(self) -> bool:
        """Whether there is an output at every token, not one per text."""
        return self.kind in PER_TOKEN

    @property
    def reads_first_token(self) -> bool:
        """Whether it reads nothing but the last layer's state of the first token."""
        reads_more = self.per_token or self.pooling == "mean" or self.layers or self.branches
        return not (reads_more or self.module)

    @property
    def outputs(self) -> int:
        """Width of the output; 0: as wide as what the head reads, without a projection."""
        if self.kind in LABELLED:
            return len(self.labels)
        return {REGRESSION: 1, CHOICE: 1, DETECTION: 1, SPAN: 2, VECTOR: self.size}[self.kind]


def conflicts_of_numbers(
    names: Sequence[str], means: Sequence[float], deviations: Sequence[float]
) -> Iterator[Refusal]:
    """The conflicts in columns of numbers, and in the means and deviations of them."""
    if len(set(names)) < len(names):
        yield "numbers", "must name each column once"
    for key, values in (("means", means), ("deviations", deviations)):
        if len(values) not in (0, len(names)) or len(means) != len(deviations):
            yield key, f"must be one for each of the {len(names)} numbers, or empty"
    if any(value <= 0 for value in deviations):
        yield "deviations", "must be above 0"
