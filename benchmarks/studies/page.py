"""The tables of studies in a page of prose: each stands between two marks, and is renewed there."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.durable import atomic_write

MARKED = re.compile(r"<!-- table of (?P<study>\w+) -->\n(?P<table>.*?)<!-- end of table -->", re.S)


def of_results(folder: Path) -> Path:
    """The page of a folder of results: ``docs/studies.md`` of ``docs/studies/results``."""
    return folder.resolve().parent.with_suffix(".md")


def renew(page: Path, study: str, table: str) -> None:
    """Write a study's table between its marks; without the page or the marks do nothing."""
    if not page.exists():
        return
    marked = f"<!-- table of {study} -->\n\n{table}\n\n<!-- end of table -->"
    text = page.read_text(encoding="utf-8")
    renewed = MARKED.sub(lambda found: marked if found["study"] == study else found[0], text)
    if renewed != text:
        atomic_write(page, renewed)  # another runner may read it
