"""Shared parts of all pictures of results: width, style, frame, and the labels of their axes."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

WIDTH, MARGIN = 760, 16  # in SVG's units, as are all places below
STYLE = (
    "text{font:12px sans-serif;fill:#333}.tick{stroke:#ddd}.first{stroke:#999;stroke-dasharray:4 3}"
    ".dot{fill:#2a6fb0;fill-opacity:.55}.mean{stroke:#12395e;stroke-width:2.5}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}.tick{stroke:#444}.first{stroke:#888}"
    ".dot{fill:#6fb1ee}.mean{stroke:#cfe6fb}}"
)


def document(title: str, height: float, parts: Iterable[str]) -> str:
    """The SVG that these parts make up; `title` is for readers who cannot see it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def tick_below(x: float, top: float, bottom: float, value: float) -> str:
    """A line from `top` to `bottom` with its number under it."""
    return (
        f'<path class="tick" d="M{x} {top}V{bottom}"/>'
        f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{value:g}</text>'
    )


def label_left_of(x: float, y: float, text: str) -> str:
    """A text that ends before `x`, in the middle of the height `y`."""
    return f'<text x="{x - 8:.0f}" y="{y + 4:g}" text-anchor="end">{escape(text)}</text>'
