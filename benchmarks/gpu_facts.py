"""The facts of what has been run on a GPU, in one file, and the pages that say so.

    python benchmarks/gpu_facts.py figures/gpu_facts.json    # adopt what `gpu.py` left

The facts are `docs/gpu_facts.json`. Between its marks, `docs/gpu.md` has a table of them, and some
pages a sentence.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROOT = Path(__file__).resolve().parents[1]
FACTS = ROOT / "docs/gpu_facts.json"
PAGES = tuple(ROOT / page for page in ("README.md", "docs/gpu.md", "docs/faq.md"))
MARKED = re.compile(r"<!-- gpu (?P<part>\w+) -->\n(?P<text>.*?)<!-- end of gpu (?P=part) -->", re.S)
NOT_RUN = "not run on a GPU"

Row = tuple[str, str]  # what was measured, and the figures


def of_this_machine() -> dict[str, Any]:
    """The facts about device and software, before any section has run; no device without a GPU."""
    head = "git rev-parse --short HEAD 2>/dev/null"  # nothing where there is no git
    revision = subprocess.run(head, cwd=ROOT, shell=True, capture_output=True, text=True).stdout
    return {
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "software": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
        "revision": revision.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
        "sections": {},
    }


def table(facts: Mapping[str, Any], sections: Mapping[str, str]) -> str:
    """A Markdown table of all `sections` (name -> what it measures), run on a GPU or not."""
    lines = ["| section | what | figures |", "|---|---|---|"]
    for name, measures in sections.items():
        rows = facts["sections"].get(name) if facts["device"] else None
        if not rows:
            lines.append(f"| `{name}` | {measures} | {NOT_RUN} |")
        for what, figures in rows or ():
            lines.append(f"| `{name}` | {what} | {figures} |")
    return "\n".join(lines)


def sentence(facts: Mapping[str, Any], sections: Mapping[str, str]) -> str:
    """One sentence: the sections that have been run on a GPU and those that have not."""
    names = [f"`{name}`" for name in sections]
    if not facts["device"]:
        return "Nothing has been run on a GPU yet: figures about GPUs are counted, or bounds."
    run = [f"`{name}`" for name in sections if facts["sections"].get(name)]
    left = [name for name in names if name not in run]
    rest = f"; not run: {', '.join(left)}" if left else ""
    return f"Run on an {facts['device']} ({facts['date']}): {', '.join(run)}{rest}."


def renewed(text: str, parts: Mapping[str, str]) -> str:
    """The text of a page with each of `parts` between its marks."""

    def between(match: re.Match[str]) -> str:
        part = match["part"]
        return f"<!-- gpu {part} -->\n{parts[part]}\n<!-- end of gpu {part} -->"

    return MARKED.sub(between, text)


def parts_of(facts: Mapping[str, Any]) -> dict[str, str]:
    """The text between the marks, by part."""
    from benchmarks.gpu import MEASURES

    return {"table": f"\n{table(facts, MEASURES)}\n", "sentence": sentence(facts, MEASURES)}


def main() -> None:
    """Adopt a file of facts, and renew the pages."""
    if len(sys.argv) > 1:
        FACTS.write_text(Path(sys.argv[1]).read_text(encoding="utf-8"), encoding="utf-8")
    parts = parts_of(json.loads(FACTS.read_text(encoding="utf-8")))
    for page in PAGES:
        page.write_text(renewed(page.read_text(encoding="utf-8"), parts), encoding="utf-8")


if __name__ == "__main__":
    main()
