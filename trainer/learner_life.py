"""A learner's life in a job: its initial weights, when it joins, grows and is done.

Progressive stacking (`stacking`) is that of Gong et al., "Efficient Training of BERT by
Progressively Stacking", ICML 2019: layer i of L becomes layers i and i + L, and the optimizer is
reset. `teacher.model` is the final size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from configs.rules import (
    COUNT,
    FRACTION,
    HOURS,
    INDEX,
    NOT_EMPTY,
    PATH,
    Ascending,
    OneOf,
    Range,
    Unit,
    positive,
)
from configs.section import Refusal, Section
from model import Ability, ModelConfig
from trainer.objectives.layers import at_depth


@dataclass
class ThresholdConfig(Section):
    """A held-out score (`evaluation.every`) that is at least, or at most, a number."""

    metric: Annotated[
        str | None,
        NOT_EMPTY,
        "The score; null: evaluation.metric. loss_over_unigram and accuracy_over_unigram are "
        "the differences to the unigram baseline.",
    ] = None
    at_least: Annotated[
        float | None, Range(-1000, 1000), "Reached when the score is at least this."
    ] = None
    at_most: Annotated[
        float | None, Range(-1000, 1000), "Reached when the score is at most this."
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if (self.at_least is None) == (self.at_most is None):
            yield "at_least", "set either this or at_most"


@dataclass
class StartConfig(Section):
    """When a student joins: at a step, and once the teacher has reached a threshold."""

    step: Annotated[int, INDEX, Unit("steps"), "The job's step from which it may join."] = 0
    fraction: Annotated[
        float | None, FRACTION, "Or the fraction of the job's steps after which it may join."
    ] = None
    teacher: Annotated[
        ThresholdConfig | None, "The score that the teacher must reach; null: none."
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if self.step and self.fraction is not None:
            yield "fraction", "set either this or step"

    def in_steps(self, steps: int) -> StartConfig:
        """This start without a fraction, in a job of this many steps."""
        if self.fraction is None:
            return self
        return dataclasses.replace(self, step=round(self.fraction * steps), fraction=None)


@dataclass
class BudgetConfig(Section):
    """A learner's own budget, counted from its start; without one it trains to the job's end.

    The schedule runs over the budget, except for `patience`. Of several limits, the first one
    reached ends the training. A student is then done; a teacher keeps teaching, at the cost of its
    forward pass. With `hours`, runs are not reproducible, because the time of a step varies.
    """

    steps: Annotated[int | None, COUNT, Unit("steps"), "The learner's own steps."] = None
    fraction: Annotated[
        float | None, positive(1.0), "Or the learner's own steps, as a fraction of the job's."
    ] = None
    tokens: Annotated[int | None, COUNT, Unit("tokens"), "Tokens that the learner reads."] = None
    hours: Annotated[
        float | None,
        HOURS,
        Unit("hours"),
        "Training time over all restarts, not counting a progressive transfer.",
    ] = None
    patience: Annotated[
        int | None,
        COUNT,
        Unit("evaluations"),
        "Its training ends after this many held-out evaluations in a row without a "
        "new best of its primary metric; those of stages before its last one do not count. "
        "default: `stop.patience` of the job.",
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if self.steps is not None and self.fraction is not None:
            yield "fraction", "set either this or steps"

    def in_steps(self, steps: int) -> BudgetConfig:
        """This budget without a fraction, in a job of this many steps."""
        if self.fraction is None:
            return self
        count = max(1, round(self.fraction * steps))
        return dataclasses.replace(self, steps=count, fraction=None)


@dataclass
class InitConfig(Section):
    """A learner's initial weights; random when nothing is set."""

    teacher_layers: Annotated[
        list[int] | None,
        "Initialise a student's layers from these layers of its teacher, counted from"
        " 0, when it starts. In a pre-norm model with a norm of the embeddings the "
        "first must be 0.",
    ] = None
    teacher_embeddings: Annotated[
        bool, "Initialise embeddings and heads from the teacher's when the student starts."
    ] = False
    pretrained: Annotated[
        str | None, PATH, NOT_EMPTY, "A folder in Hugging Face format, or an export."
    ] = None
    tile: Annotated[
        str | None,
        PATH,
        NOT_EMPTY,
        "A folder with a smaller model, whose tensors and layers are repeated to fill this "
        "model (ModernBERT-large).",
    ] = None
    word_vectors: Annotated[
        str | None,
        PATH,
        NOT_EMPTY,
        "A file in GloVe's or word2vec's text form. A token that begins a word starts with the "
        "vector of the word that it spells; everything else is random.",
    ] = None
    random: Annotated[
        bool, "Read only the model and the tokenizer of `pretrained`; the weights are random."
    ] = False
    layers: Annotated[
        list[int] | None,
        "Take only these layers of `pretrained`, counted from 0, in this order. In a "
        "pre-norm model with a norm of the embeddings the first must be 0.",
    ] = None
    heads: Annotated[
        str,
        OneOf("loaded", "new"),
        "new: the heads of tasks in `pretrained` are left out, and the heads of this job "
        "begin with random weights.",
    ] = "loaded"
    labels: Annotated[
        list[str] | None,
        "The examples' names for the labels of the head in `pretrained`, in the head's "
        "order, if its config.json names them differently. null: the names in config.json; "
        "if it has none (LABEL_0, LABEL_1), the examples' labels, sorted.",
    ] = None
    seed: Annotated[
        int | None,
        INDEX,
        "The seed of random weights: equal models with equal seeds get equal weights. null: "
        "derived from the job's seed and the learner's name.",
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        embeddings = self.teacher_embeddings or None
        origins = (self.teacher_layers, embeddings, self.pretrained, self.tile, self.word_vectors)
        if sum(origin is not None for origin in origins) > 1:
            yield (
                "pretrained",
                "set one of this, tile, teacher_layers, teacher_embeddings and word_vectors",
            )
        if self.random and self.pretrained is None:
            yield "random", "is for pretrained, and weights are random without it; remove it"
        for key in self.changed("layers", "heads", "labels") if self.pretrained is None else ():
            yield key, "is for pretrained; set that, or remove this"
        if self.random and self.heads == "new":
            yield "heads", "all weights are random; remove it"
        if self.labels is not None and len({*self.labels}) < max(2, len(self.labels)):
            yield "labels", "must name at least two labels, each once"

    @property
    def embeddings_only(self) -> bool:
        """Whether the layers begin with random weights while other parts do not."""
        return self.teacher_embeddings or self.word_vectors is not None

    @property
    def weights(self) -> str | None:
        """The folder whose weights the learner begins with; None: none, though it may be read."""
        return None if self.random else self.pretrained


@dataclass
class StackingConfig(Section):
    """Progressive stacking: a teacher begins with few layers, which are then doubled."""

    steps: Annotated[
        list[int],
        COUNT,
        Ascending(),
        Unit("steps"),
        "The job's steps before which the layers double; empty: the teacher has its final size.",
    ] = field(default_factory=list)

    def conflicts_with(self, model: ModelConfig) -> Iterator[Refusal]:
        """Why the final `model` cannot be reached by doubling."""
        times = 2 ** len(self.steps)
        if model.layers % times:
            yield "stacking.steps", f"{model.layers} layers are not {times} times a smaller number"
        if self.steps and (why := model.cannot(Ability.GROW)):
            yield "stacking.steps", why

    def layers_at(self, step: int, final_layers: int) -> int:
        """The teacher's number of layers at `step`, from 0."""
        return final_layers >> sum(growth > step for growth in self.steps)


def layers_of_the_moment(layers: Sequence[int], final_layers: int, now: int) -> list[int]:
    """Layers of the final teacher, mapped to the same relative depths of one with `now` layers.

    All layers are counted from 0.
    """
    numbers = at_depth(dict(enumerate(layer + 1 for layer in layers)), final_layers, now)
    return [number - 1 for number in numbers.values()]
