"""The phrases that the table and the page have in common."""

from __future__ import annotations

from collections.abc import Sequence

from model.attention_heads import UNIFORM, Head
from trainer.analysis.analysis import Analysis, Effects, Scores
from trainer.scoring.column import SHARE, Column

RULE = (
    "Vertical: attention to [CLS], [SEP] and punctuation. Diagonal: to the token itself and its "
    "neighbours. Block: within the own segment. A map has a pattern where at least half of the "
    "attention that could be there, beyond that of uniform attention, is there."
)


LINGUISTIC = (
    "The attention that words with a feature receive from all tokens, divided by their number, or "
    "from [CLS] alone, and that between the words of a pair, in either direction. Of several in a "
    "sentence the largest counts. The mean over the sentences that have one."
)


def disabled_how(analysis: Analysis) -> str:
    """A sentence that says how the model works without a head."""
    if analysis.way == UNIFORM:
        return "A disabled head attends to all tokens equally."
    return "A disabled head adds nothing to its layer."


def change_heading(column: Column) -> str:
    """The heading of a column of changes: the score, and the unit."""
    return f"{column.heading}, percentage points" if column.form == SHARE else column.heading


def changed(effects: Effects, scores: Scores) -> str:
    """The change of the ranking score, with its sign."""
    change = effects.change(scores)
    if change is None:
        return "undefined"
    return f"{100 * change:+.1f}" if effects.column.form == SHARE else f"{change:+.3f}"


def written(columns: Sequence[Column], scores: Scores) -> str:
    """All scores, in words."""
    return ", ".join(
        f"{column.heading} {column.written(scores[column.name])}"
        for column in columns
        if column.name in scores
    )


def head_name(effects: Effects, head: Head) -> str:
    """``3.2`` is head 2 of layer 3; of layers that share their heads ``1-4.2``."""
    return f"{layer_name(effects, head.weights)}.{head.head + 1}"


def layer_name(effects: Effects, weights: int) -> str:
    """The layer with this set of attention weights, or ``1-4``: the layers that share it."""
    layers = effects.layers[weights]
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
