"""The tables of studies in pages of prose: each stands between two marks, and is renewed there."""

from __future__ import annotations

import re
from pathlib import Path

from configs.durable import atomic_write

MARKED = re.compile(r"<!-- table of (?P<study>\w+) -->\n(?P<table>.*?)<!-- end of table -->", re.S)


def pages_of(results: Path) -> list[Path]:
    """The pages of a folder of results: the Markdown files beside ``docs/studies/results``."""
    return sorted(results.resolve().parent.glob("*.md"))


def renew(results: Path, study: str, table: str) -> None:
    """Write a study's table between its marks in the pages of a folder of results."""
    marked = f"<!-- table of {study} -->\n\n{table}\n\n<!-- end of table -->"
    for page in pages_of(results):
        text = page.read_text(encoding="utf-8")
        renewed = MARKED.sub(lambda match: marked if match["study"] == study else match[0], text)
        if renewed != text:
            atomic_write(page, renewed)  # another runner may read it
