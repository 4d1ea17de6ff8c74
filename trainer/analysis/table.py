"""The analysis for a terminal, and the phrases that its page shares with it."""

from __future__ import annotations

from collections.abc import Sequence

from model.attention_heads import UNIFORM, Head
from trainer.analysis.analysis import Analysis, Effect, Effects, Pruned, Scores
from trainer.analysis.linguistic import KINDS, LinguisticAttention
from trainer.analysis.maps import PATTERNS
from trainer.report.elements import percent
from trainer.report.table import as_text, plain_table
from trainer.scoring.metric import SHARE, Column

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
STRONGEST = 3  # heads that are named of each kind of attention


def analysis_table(analysis: Analysis) -> str:
    """A line for each layer: the shares of the patterns, and what its heads are worth."""
    effects = analysis.effects
    heads = ("most needed head", "least needed head", "all heads")
    table = plain_table("layer", *PATTERNS, *heads)
    table.columns[0].justify = "right"
    for number, shares in enumerate(analysis.patterns.shares.mean(dim=1), start=1):
        table.add_row(str(number), *map(percent, shares.tolist()), *_of_layer(effects, number))
    return "\n".join(
        [
            f"{analysis.folder} on {analysis.examples}: {written(analysis.columns, effects.whole)}",
            "",
            as_text(table),
            *(["", _linguistic(analysis.linguistic)] if analysis.linguistic else []),
            *(["", _pruned(analysis, analysis.pruned)] if analysis.pruned else []),
            "",
            RULE,
            *([LINGUISTIC] if analysis.linguistic else []),
            f"Shares are of the heads' maps of {analysis.patterns.sequences:,} sequences.",
            f"{disabled_how(analysis)} Changes without it: {change_heading(effects.column)}, on "
            f"{analysis.scored}. Head 3.2 is head 2 of layer 3.",
        ]
    )


def _linguistic(linguistic: LinguisticAttention) -> str:
    """A line for each feature and pair: its mean attention, and the heads with the most."""
    table = plain_table("attention to, between", "sentences", "mean", "heads with the most")
    for kind, count, means in zip(KINDS, linguistic.counts, linguistic.means, strict=True):
        if count:
            values, places = means.flatten().topk(min(STRONGEST, means.numel()))
            heads = ", ".join(
                f"{place // means.shape[1] + 1}.{place % means.shape[1] + 1}: {value:.3f}"
                for value, place in zip(values.tolist(), places.tolist(), strict=True)
            )
            table.add_row(kind, f"{count:,}", f"{means.mean():.3f}", heads)
    return as_text(table)


def _of_layer(effects: Effects, number: int) -> tuple[str, str, str]:
    """The heads whose loss costs most and least, and what that of all of them costs."""
    weights = next(i for i, layers in enumerate(effects.layers) if number in layers)
    in_layer = [effect for effect in effects.single if effect.heads[0].weights == weights]
    together = effects.all_heads[weights]
    return (
        _named(effects, max(in_layer, key=effects.loss)),
        _named(effects, min(in_layer, key=effects.loss)),
        changed(effects, together.scores),
    )


def _named(effects: Effects, effect: Effect) -> str:
    return f"{head_name(effects, effect.heads[0])}: {changed(effects, effect.scores)}"


def _pruned(analysis: Analysis, pruned: Pruned) -> str:
    heads = ", ".join(head_name(analysis.effects, head) for head in pruned.heads)
    return (
        f"Without heads {heads}: {written(analysis.columns, pruned.scores)} "
        f"({changed(analysis.effects, pruned.scores)}), in {pruned.folder}"
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
