"""The analysis as a page: the heads of all layers as a map of patterns, and one of their worth."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from trainer.analysis.analysis import Analysis
from trainer.analysis.disabling import Effect, Effects
from trainer.analysis.example_maps import scale, section
from trainer.analysis.linguistic import KINDS
from trainer.analysis.patterns import PATTERNS
from trainer.analysis.words import (
    LINGUISTIC,
    RULE,
    change_heading,
    changed,
    disabled_how,
    head_name,
    layer_name,
    written,
)
from trainer.report.elements import document, percent
from trainer.scoring.column import SHARE

STYLE = Path(__file__).with_name("style.css")
COLOURS = (0, 1, 3, 2, 7)  # of the patterns, in the style sheet of all pages
DEEPEST = 60  # per cent of its colour that a cell gets, so that its number can be read


def render(found: Analysis) -> str:
    """The page as text."""
    title = f"{Path(found.folder).resolve().name} on {found.examples}"
    head = (
        f"<header><h1>{escape(title)}</h1><p>Attention heads: what they attend to, and what they "
        f"are worth. The whole model: {escape(written(found.columns, found.effects.whole))}, on "
        f"{escape(found.scored)}.</p></header>"
    )
    example = section(found.example, found.patterns)
    body = head + _patterns(found) + example + _effects(found) + _linguistic(found) + _pruned(found)
    return document(title, body, style=STYLE.read_text(encoding="utf-8"))


def _patterns(found: Analysis) -> str:
    """A row for each layer, a cell for each head: the shares of the patterns as one bar."""
    shares = found.patterns.shares
    rows = "".join(
        f"<tr><td>{number}</td>{''.join(_bar_cell(one) for one in heads.tolist())}"
        f"{_bar_cell(heads.mean(dim=0).tolist(), wide=True)}</tr>"
        for number, heads in enumerate(shares, start=1)
    )
    overall = shares.mean(dim=(0, 1)).tolist()
    legend = "".join(
        f'<span style="--c:var(--c{colour})"><i></i>{name} <b>{percent(share)}</b></span>'
        for name, colour, share in zip(PATTERNS, COLOURS, overall, strict=True)
    )
    note = f"{RULE} Shares are of the maps of {found.patterns.sequences:,} sequences."
    return (
        f'<section><h2>Patterns</h2><p>{escape(note)}</p><div class="legend">{legend}</div>'
        f"{_table(shares.shape[1], rows)}</section>"
    )


def _bar_cell(shares: Sequence[float], wide: bool = False) -> str:
    told = ", ".join(
        f"{name} {percent(share)}" for name, share in zip(PATTERNS, shares, strict=True) if share
    )
    parts = "".join(
        f'<i style="--c:var(--c{colour});flex-grow:{share:.4f}"></i>'
        for colour, share in zip(COLOURS, shares, strict=True)
        if share
    )
    return f'<td><span class="mix{" wide" * wide}" title="{told}">{parts}</span></td>'


def _effects(found: Analysis) -> str:
    """A row for each set of attention weights: the change without each head, and without all."""
    effects = found.effects
    single = [abs(change) for one in effects.single if (change := effects.change(one.scores))]
    largest = max(single, default=0.0)
    most = _change(effects, largest)
    rows = ""
    for weights, together in enumerate(effects.all_heads):
        own = [one for one in effects.single if one.heads[0].weights == weights]
        cells = "".join(_change_cell(effects, one, largest) for one in own)
        cells += f'<td class="change all">{changed(effects, together.scores)}</td>'
        rows += f"<tr><td>{layer_name(effects, weights)}</td>{cells}</tr>"
    note = f"{disabled_how(found)} The change of the score: {change_heading(effects.column)}."
    legend = scale("--c1", f"better without, by {most}", f"worse without, by {most}", "--c0")
    heads = found.patterns.shares.shape[1]
    return (
        f"<section><h2>Without a head</h2><p>{escape(note)}</p>{legend}"
        f"{_table(heads, rows)}</section>"
    )


def _change(effects: Effects, size: float) -> str:
    return f"{100 * size:.1f}" if effects.column.form == SHARE else f"{size:.3f}"


def _change_cell(effects: Effects, effect: Effect, largest: float) -> str:
    """The deepest colour is that of the `largest` change without a single head."""
    loss = effects.loss(effect)
    share = min(1.0, abs(loss) / largest) if largest else 0.0
    colour = 1 if loss > 0 else 0
    style = f"--c:var(--c{colour});--depth:{DEEPEST * share:.0f}%"
    return f'<td class="change" style="{style}">{changed(effects, effect.scores)}</td>'


def _linguistic(found: Analysis) -> str:
    """A map of all heads for each feature and pair of the parsed sentences."""
    if found.linguistic is None:
        return ""
    maps = zip(KINDS, found.linguistic.counts, found.linguistic.means.tolist(), strict=True)
    sections = "".join(
        f"<h3>{kind}, in {count:,} of {found.linguistic.sentences:,} sentences</h3>"
        f"{scale('--c0', '0', f'{max(map(max, layers)):.2f}')}{_attention_map(layers)}"
        for kind, count, layers in maps
        if count
    )
    title = f"Attention to words of {escape(found.linguistic.file)}"
    return f"<section><h2>{title}</h2><p>{escape(LINGUISTIC)}</p>{sections}</section>"


def _attention_map(layers: Sequence[Sequence[float]]) -> str:
    """The deepest colour is that of the head with the most."""
    largest = max(map(max, layers)) or 1.0
    rows = ""
    for number, heads in enumerate(layers, start=1):
        means = [*heads, sum(heads) / len(heads)]
        cells = "".join(
            f'<td class="change" style="--c:var(--c0);--depth:{DEEPEST * mean / largest:.0f}%">'
            f"{mean:.2f}</td>"
            for mean in means
        )
        rows += f"<tr><td>{number}</td>{cells}</tr>"
    return _table(len(layers[0]), rows)


def _table(heads: int, rows: str) -> str:
    headings = "".join(f"<th>{number}</th>" for number in range(1, heads + 1))
    return (
        '<div class="scroll"><table class="heads"><thead><tr><th>layer, head</th>'
        f"{headings}<th>all</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _pruned(found: Analysis) -> str:
    pruned, effects = found.pruned, found.effects
    if pruned is None:
        return ""
    heads = ", ".join(head_name(effects, head) for head in pruned.heads)
    return (
        f"<section><h2>Pruned</h2><p>Without heads {heads} (layer.head), whose weights are 0: "
        f"{escape(written(found.columns, pruned.scores))}, {changed(effects, pruned.scores)} "
        f"({change_heading(effects.column)}). In <code>{escape(str(pruned.folder))}</code></p>"
        "</section>"
    )
