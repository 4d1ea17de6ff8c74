"""The analysis for a terminal."""

from __future__ import annotations

from trainer.analysis.analysis import Analysis, Effect, Effects, Pruned
from trainer.analysis.linguistic import KINDS, LinguisticAttention
from trainer.analysis.patterns import PATTERNS
from trainer.analysis.words import (
    LINGUISTIC,
    RULE,
    change_heading,
    changed,
    disabled_how,
    head_name,
    written,
)
from trainer.report.elements import percent
from trainer.report.table import as_text, plain_table

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
