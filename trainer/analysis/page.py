"""The analysis for a terminal, and as a page: heads as a map of patterns and one of their worth.

The attention maps of one example are pictures: large ones with tokens, small ones of all heads.
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from torch import Tensor

from configs.tables import as_text, plain_table
from model.attention_heads import UNIFORM, Head
from trainer.analysis.analysis import Analysis, Effect, Effects, Pruned, Scores
from trainer.analysis.linguistic import KINDS, LinguisticAttention
from trainer.analysis.maps import PATTERNS, ExampleMaps, HeadPatterns
from trainer.report.elements import document, percent, shortened
from trainer.scoring.columns import SHARE, Column

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
            *(["", _linguistic_lines(analysis.linguistic)] if analysis.linguistic else []),
            *(["", _pruned_line(analysis, analysis.pruned)] if analysis.pruned else []),
            "",
            RULE,
            *([LINGUISTIC] if analysis.linguistic else []),
            f"Shares are of the heads' maps of {analysis.patterns.sequences:,} sequences.",
            f"{disabled_how(analysis)} Changes without it: {change_heading(effects.column)}, on "
            f"{analysis.scored}. Head 3.2 is head 2 of layer 3.",
        ]
    )


def _linguistic_lines(linguistic: LinguisticAttention) -> str:
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


def _pruned_line(analysis: Analysis, pruned: Pruned) -> str:
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


STYLE = Path(__file__).with_name("style.css")
COLOURS = (0, 1, 3, 2, 7)  # of the patterns, in the style sheet of all pages
DEEPEST = 60  # per cent of its colour that a cell gets, so that its number can be read


def render(analysis: Analysis) -> str:
    """The page as text."""
    title = f"{Path(analysis.folder).resolve().name} on {analysis.examples}"
    scores = written(analysis.columns, analysis.effects.whole)
    head = (
        f"<header><h1>{escape(title)}</h1><p>Attention heads: what they attend to, and what they "
        f"are worth. The whole model: {escape(scores)}, on "
        f"{escape(analysis.scored)}.</p></header>"
    )
    example = section(analysis.example, analysis.patterns)
    body = (
        head
        + _patterns(analysis)
        + example
        + _effects(analysis)
        + _linguistic(analysis)
        + _pruned(analysis)
    )
    return document(title, body, style=STYLE.read_text(encoding="utf-8"))


def _patterns(analysis: Analysis) -> str:
    """A row for each layer, a cell for each head: the shares of the patterns as one bar."""
    shares = analysis.patterns.shares
    rows = "".join(
        f"<tr><td>{number}</td>{''.join(_bar_cell(head) for head in heads.tolist())}"
        f"{_bar_cell(heads.mean(dim=0).tolist(), wide=True)}</tr>"
        for number, heads in enumerate(shares, start=1)
    )
    overall = shares.mean(dim=(0, 1)).tolist()
    legend = "".join(
        f'<span style="--c:var(--c{colour})"><i></i>{name} <b>{percent(share)}</b></span>'
        for name, colour, share in zip(PATTERNS, COLOURS, overall, strict=True)
    )
    note = f"{RULE} Shares are of the maps of {analysis.patterns.sequences:,} sequences."
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


def _effects(analysis: Analysis) -> str:
    """A row for each set of attention weights: the change without each head, and without all."""
    effects = analysis.effects
    single = [abs(change) for effect in effects.single if (change := effects.change(effect.scores))]
    largest = max(single, default=0.0)
    most = _change(effects, largest)
    rows = ""
    for weights, together in enumerate(effects.all_heads):
        in_row = [effect for effect in effects.single if effect.heads[0].weights == weights]
        cells = "".join(_change_cell(effects, effect, largest) for effect in in_row)
        cells += f'<td class="change all">{changed(effects, together.scores)}</td>'
        rows += f"<tr><td>{layer_name(effects, weights)}</td>{cells}</tr>"
    note = f"{disabled_how(analysis)} The change of the score: {change_heading(effects.column)}."
    legend = scale("--c1", f"better without, by {most}", f"worse without, by {most}", "--c0")
    heads = analysis.patterns.shares.shape[1]
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


def _linguistic(analysis: Analysis) -> str:
    """A map of all heads for each feature and pair of the parsed sentences."""
    if analysis.linguistic is None:
        return ""
    maps = zip(KINDS, analysis.linguistic.counts, analysis.linguistic.means.tolist(), strict=True)
    sections = "".join(
        f"<h3>{kind}, in {count:,} of {analysis.linguistic.sentences:,} sentences</h3>"
        f"{scale('--c0', '0', f'{max(map(max, layers)):.2f}')}{_attention_map(layers)}"
        for kind, count, layers in maps
        if count
    )
    title = f"Attention to words of {escape(analysis.linguistic.file)}"
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


def _table(heads: int, rows: str, last: str = "<th>all</th>") -> str:
    headings = "".join(f"<th>{number}</th>" for number in range(1, heads + 1))
    return (
        '<div class="scroll"><table class="heads"><thead><tr><th>layer, head</th>'
        f"{headings}{last}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _pruned(analysis: Analysis) -> str:
    pruned, effects = analysis.pruned, analysis.effects
    if pruned is None:
        return ""
    heads = ", ".join(head_name(effects, head) for head in pruned.heads)
    return (
        f"<section><h2>Pruned</h2><p>Without heads {heads} (layer.head), whose weights are 0: "
        f"{escape(written(analysis.columns, pruned.scores))}, {changed(effects, pruned.scores)} "
        f"({change_heading(effects.column)}). In <code>{escape(str(pruned.folder))}</code></p>"
        "</section>"
    )


LEVELS = 20  # of a colour
CELL, LETTER, FONT = 18, 8, 11  # pixels: of a cell's side, a letter's width and height


def section(example: ExampleMaps, patterns: HeadPatterns) -> str:
    """The map of the head that shows each pattern best, then those of all heads."""
    maps = example.weights
    tokens = [shortened(token) for token in example.tokens]
    large = "".join(
        f"<figure><figcaption>Layer {layer + 1}, head {head + 1}: {pattern}</figcaption>"
        f'<div class="scroll">{_large(maps[layer, head], tokens)}</div></figure>'
        for pattern, layer, head in _typical(patterns)
    )
    rows = "".join(
        f"<tr><td>{layer}</td>{''.join(f'<td>{_small(weights)}</td>' for weights in heads)}</tr>"
        for layer, heads in enumerate(maps, start=1)
    )
    return (
        '<section id="attention"><h2>An example</h2><p>From each token (a row) to each token (a '
        f"column): {escape(' '.join(example.tokens))}</p>{scale('--c0', '0', '1')}"
        f'<div class="maps">{large}</div><h3>All heads</h3>'
        f"{_table(maps.shape[1], rows, last='')}</section>"
    )


def scale(colour: str, low: str, high: str, other: str = "") -> str:
    """A legend of colours from `low` to `high`; with an `other` colour, 0 is in the middle."""
    first = f"var({other}), transparent" if other else "transparent"
    bar = f"background:linear-gradient(to right, {first}, var({colour}))"
    return f'<p class="scale">{low}<i style="{bar}"></i>{high}</p>'


def _typical(patterns: HeadPatterns) -> list[tuple[str, int, int]]:
    """The patterns that occur, with the layer and head that have each most often, from 0."""
    heads = patterns.shares.shape[1]
    best = [patterns.shares[:, :, number].flatten().max(dim=0) for number in range(len(PATTERNS))]
    return [
        (pattern, *divmod(int(place), heads))
        for pattern, (share, place) in zip(PATTERNS, best, strict=True)
        if share > 0
    ]


def _cells(weights: Tensor) -> str:
    """A path for each level of colour, of horizontal strokes; cells are 1 wide and high."""
    strokes: dict[int, list[str]] = {}
    for row, levels in enumerate((weights * LEVELS).round().int().tolist()):
        for column, level in enumerate(levels):
            if level:
                strokes.setdefault(level, []).append(f"M{column} {row}.5h1")
    return "".join(
        f'<path stroke-opacity="{level / LEVELS:g}" d="{"".join(moves)}"/>'
        for level, moves in sorted(strokes.items())
    )


def _small(weights: Tensor) -> str:
    size = len(weights)
    return f'<svg class="map small" viewBox="0 0 {size} {size}">{_cells(weights)}</svg>'


def _large(weights: Tensor, tokens: Sequence[str]) -> str:
    letters = 10 + LETTER * max(map(len, tokens))
    side = letters + CELL * len(tokens)
    names = "".join(
        f'<text x="{letters - 6}" y="{middle + 4}" text-anchor="end">{escape(token)}</text>'
        f'<text transform="translate({middle + 4} {letters - 6}) rotate(-90)">'
        f"{escape(token)}</text>"
        for token, middle in zip(tokens, range(letters + CELL // 2, side, CELL), strict=True)
    )
    return (
        f'<svg class="map" width="{side}" height="{side}" font-size="{FONT}">{names}'
        f'<g transform="translate({letters} {letters}) scale({CELL})">{_cells(weights)}</g></svg>'
    )
