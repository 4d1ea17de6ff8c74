"""The attention maps of one example, as pictures: large with tokens, and small for all heads."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from torch import Tensor

from trainer.analysis.maps import ExampleMaps, HeadPatterns
from trainer.analysis.patterns import PATTERNS
from trainer.report.layout import shortened

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
    headings = "".join(f"<th>{head}</th>" for head in range(1, maps.shape[1] + 1))
    rows = "".join(
        f"<tr><td>{layer}</td>{''.join(f'<td>{_small(one)}</td>' for one in heads)}</tr>"
        for layer, heads in enumerate(maps, start=1)
    )
    return (
        '<section id="attention"><h2>An example</h2><p>From each token (a row) to each token (a '
        f"column): {escape(' '.join(example.tokens))}</p>{scale('--c0', '0', '1')}"
        f'<div class="maps">{large}</div><h3>All heads</h3><div class="scroll"><table '
        f'class="heads"><thead><tr><th>layer, head</th>{headings}</tr></thead><tbody>{rows}'
        "</tbody></table></div></section>"
    )


def scale(colour: str, low: str, high: str, other: str = "") -> str:
    """What colours mean: from `low` to `high`; with an `other` colour, 0 is in the middle."""
    first = f"var({other}), transparent" if other else "transparent"
    bar = f"background:linear-gradient(to right, {first}, var({colour}))"
    return f'<p class="scale">{low}<i style="{bar}"></i>{high}</p>'


def _typical(patterns: HeadPatterns) -> list[tuple[str, int, int]]:
    """Each pattern that occurs, with the layer and head that have it most often, from 0."""
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
