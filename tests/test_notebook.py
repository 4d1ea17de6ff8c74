"""The notebook of the Python API: it was executed, and says today what it said then."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY, command_environment

NOTEBOOK = REPOSITORY / "docs" / "python.ipynb"
END = "end of a cell"


def code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def said(cell: dict[str, Any]) -> str:
    return "".join(line for output in cell["outputs"] for line in output["text"])


def program() -> str:
    """The cells as a program, with the commands of their shell lines, and a mark behind each."""
    lines = []
    for cell in code_cells():
        for line in "".join(cell["source"]).splitlines():
            words = shlex.split(line.removeprefix("!")) if line.startswith("!") else []
            command = [sys.executable, "-m", *words]
            lines.append(f"subprocess.run({command!r}, check=True)" if words else line)
        lines.append(f"print({END!r}, flush=True)")
    return "\n".join(["import subprocess", *lines])


def without_numbers(text: str) -> list[str]:
    """Its lines, whatever the numbers are, and which label is the more probable one."""
    lines = re.sub(r"'label': '\w+'", "'label': N", text).strip().splitlines()
    return [re.sub(r"\d[\d.,e%-]*", "N", line) for line in lines]


def test_the_notebook_was_executed_in_order() -> None:
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert {output["output_type"] for cell in cells for output in cell["outputs"]} == {"stream"}
    source = NOTEBOOK.read_text(encoding="utf-8")
    assert "\\u001b" not in source
    for name in ("load", "train", "evaluate", "from_pretrained", "build_corpus", "predict"):
        assert f"tandem.{name}(" in source
    assert "tandem.embed(" in source
    assert "tandem.export(" in source


@pytest.mark.slow
def test_the_notebook_says_the_same_when_it_is_executed_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program()],
        cwd=tmp_path,
        env=command_environment(FORCE_COLOR="1"),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split(f"{END}\n")
    for cell, part in zip(code_cells(), parts, strict=False):
        if "tandem.train(" in "".join(cell["source"]):
            assert "Report: runs/" in part
            assert "\x1b" not in part
        else:
            assert without_numbers(part) == without_numbers(said(cell))
