"""The frame of every page: one HTML file that needs no network, with the style of all pages."""

from __future__ import annotations

from html import escape
from pathlib import Path

STYLE = Path(__file__).with_name("style.css")


def document(title: str, body: str, *, head: str = "", style: str = "", script: str = "") -> str:
    """A page: `body` is what stands in its main part; `head`, `style` and `script` are added."""
    scripts = f"\n<script>\n{script}</script>" if script else ""
    styles = STYLE.read_text(encoding="utf-8") + style
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{head}<title>{escape(title)}</title><style>\n{styles}</style></head>\n"
        f"<body><main>{body}</main>{scripts}</body></html>\n"
    )
