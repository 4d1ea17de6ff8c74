"""The worth of each attention head: the change of the scores without it, and without the worst."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from model import Model
from model.attention_heads import Head, disabled, heads_of
from trainer.scoring.column import Column

Scores = Mapping[str, float]
Scorer = Callable[[Model], Scores]


@dataclass(frozen=True)
class Effect:
    """The scores without some heads of one set of attention weights: one, or all of them."""

    heads: tuple[Head, ...]
    scores: Scores


@dataclass(frozen=True)
class Effects:
    """The scores of the whole model, without each head, and without all heads of a layer.

    column: the score by which heads are ranked. layers: by set of weights, the layers (from 1) that
    use it.
    """

    column: Column
    whole: Scores
    single: Sequence[Effect]
    all_heads: Sequence[Effect]
    layers: Sequence[Sequence[int]]

    def change(self, scores: Scores) -> float | None:
        """The ranking score less that of the whole model; None where it is undefined."""
        name = self.column.name
        if name not in scores or name not in self.whole:
            return None
        return scores[name] - self.whole[name]

    def loss(self, effect: Effect) -> float:
        """How much worse the model is without the heads; an undefined score is the worst."""
        change = self.change(effect.scores)
        if change is None:
            return float("inf")
        return -change if self.column.higher_is_better else change

    def worst(self, count: int) -> list[Head]:
        """The heads without which the model is best, the first of them by layer among equals."""
        ranked = sorted(self.single, key=self.loss)
        return [effect.heads[0] for effect in ranked[:count]]


def effects_of_heads(model: Model, score: Scorer, column: Column, way: str) -> Effects:
    """Disable each head alone, and each layer's together, and `score` the model every time."""

    def without(heads: Sequence[Head]) -> Effect:
        with disabled(model, heads, way):
            return Effect(tuple(heads), score(model))

    sets = heads_of(model)
    units = model.config.layer_units("attention")
    return Effects(
        column,
        score(model),
        [without([head]) for heads in sets for head in heads],
        [without(heads) for heads in sets],
        [
            [n for n, unit in enumerate(units, start=1) if unit == number]
            for number in range(len(sets))
        ],
    )
