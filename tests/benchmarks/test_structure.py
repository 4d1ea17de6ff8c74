"""The counts of `benchmarks/structure.py`, on a file whose counts are known."""

from __future__ import annotations

from pathlib import Path

from benchmarks.structure import CallTrace, count_file, files_of, traced, vague_words
from configs.progress import duration

SOURCE = '''"""What a file says."""

import os
from pathlib import (
    Path,
)


def names(folder: Path) -> list[str]:
    """Those of the files."""
    found = []  # a comment
    for entry in os.scandir(folder):
        found.append(entry.name)

    return found


class Kept:
    """The files that are kept."""

    limit = (
        3
    )
'''


def test_a_file_is_counted_without_blanks_comments_and_docstrings(tmp_path: Path) -> None:
    path = tmp_path / "names.py"
    path.write_text(SOURCE)
    counts = count_file(path)
    assert counts.code == 13
    assert counts.imports == 4
    assert counts.functions == [5]
    assert counts.vague == 1
    assert counts.openings == 2
    assert [line.removeprefix(f"{path}:") for line in vague_words(path)] == [
        "9: names: name the variable `found` by what it holds",
        "1: begin the docstring with a noun or verb, not What",
        "10: begin the docstring with a noun or verb, not Those",
    ]


def test_tests_and_hidden_folders_are_left_out(tmp_path: Path) -> None:
    for name in ("a/b.py", "tests/c.py", ".venv/d.py", "e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert files_of(tmp_path) == [tmp_path / "a/b.py", tmp_path / "e.py"]


def test_the_third_call_of_a_step_is_traced() -> None:
    seen: list[int] = []

    def step(number: int) -> None:
        seen.append(number)
        if number == 2:
            duration(60)

    trace: CallTrace = traced(step)
    assert seen == [0, 1, 2]
    assert {name for _, name, _ in trace.calls} >= {"step", "duration"}
