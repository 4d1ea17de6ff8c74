"""Counts what makes a tree easy or hard to inherit, here and in any other checkout.

    python benchmarks/structure.py                        # this checkout, with one traced step
    python benchmarks/structure.py /src/torchtitan        # another tree, counted only
    python benchmarks/structure.py --words                # where names and docstrings are vague

Lines of code are lines without blanks, comments and docstrings. Tests are left out, and benchmarks
except of the vague names.
The traced step is an optimizer step of a masked language model of two layers, alone and with two
students that learn from it, after two steps that are not counted: the files, functions and calls of
this project that `sys.setprofile` sees in it.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

LEFT_OUT = frozenset({"tests", "benchmarks", "build", "docs"})
VAGUE = ("one", "own", "found", "there", "whole")  # as names of variables
OPENINGS = re.compile(r"(The same|What|Those|Each|As)\b")  # of docstrings
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>"}  # functions before Python 3.12
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class FileCount:
    """The counts of one file."""

    code: int  # lines
    imports: int  # lines
    functions: list[int]  # lines of code of each function
    vague: int  # functions with a variable of a vague name
    openings: int  # docstrings that begin with a word of OPENINGS


def count_file(path: Path) -> FileCount:
    """The counts of a Python file; raises SyntaxError where it is none."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    code = _lines_of_code(text) - _lines_of_docstrings(nodes)
    functions = [node for node in nodes if isinstance(node, Function)]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return FileCount(
        code=len(code),
        imports=sum(len(_span(node) & code) for node in imports),
        functions=[len(_span(node) & code) for node in functions],
        vague=sum(any(name in VAGUE for name in _variables(node)) for node in functions),
        openings=sum(bool(OPENINGS.match(text)) for text in _docstrings(nodes)),
    )


def vague_words(path: Path) -> Iterator[str]:
    """A line for each function with a variable in VAGUE, and each docstring that opens vaguely."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    for function in (node for node in nodes if isinstance(node, Function)):
        for name in sorted(_variables(function) & {*VAGUE}):
            what = f"name the variable `{name}` by what it holds"
            yield f"{path}:{function.lineno}: {function.name}: {what}"
    for docstring in _docstring_nodes(nodes):
        if opening := OPENINGS.match(str(docstring.value)):
            what = f"begin the docstring with a noun or verb, not {opening[0]}"
            yield f"{path}:{docstring.lineno}: {what}"


def _lines_of_code(text: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    used = (token for token in tokens if token.type not in NO_CODE and token.string)
    return {line for token in used for line in range(token.start[0], token.end[0] + 1)}


def _span(node: ast.stmt | ast.expr) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _docstring_nodes(nodes: list[ast.AST]) -> Iterator[ast.Constant]:
    for node in nodes:
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | Function) and body:
            value = getattr(body[0], "value", None)
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def _lines_of_docstrings(nodes: list[ast.AST]) -> set[int]:
    return {line for node in _docstring_nodes(nodes) for line in _span(node)}


def _docstrings(nodes: list[ast.AST]) -> Iterator[str]:
    return (str(node.value) for node in _docstring_nodes(nodes))


def _variables(function: Function) -> set[str]:
    """The names that a function assigns or takes; short comprehensions count too."""
    inside = list(ast.walk(function))
    stored = {
        node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return stored | {node.arg for node in inside if isinstance(node, ast.arg)}


def files_of(root: Path, left_out: frozenset[str] = LEFT_OUT) -> list[Path]:
    """The Python files of a checkout without hidden folders, tests and, by default, benchmarks."""
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not any(
            part in left_out or part.startswith(".") for part in path.relative_to(root).parts
        )
    ]


def rows_of(counts: list[FileCount]) -> Iterator[tuple[str, str]]:
    """(what is counted, its value) for each row of the table."""
    code = [file.code for file in counts if file.code]
    functions = [lines for file in counts for lines in file.functions]
    total = sum(code)
    yield "files / lines of code", f"{len(code)} / {total / 1000:.1f}k"
    yield "lines of code per file, median", f"{statistics.median(code):.0f}"
    yield (
        "files under 40, over 400 lines of code",
        (f"{sum(lines < 40 for lines in code)}, {sum(lines > 400 for lines in code)}"),
    )
    yield "import lines, share of all", f"{sum(file.imports for file in counts) / total:.1%}"
    yield (
        "lines per function, median / most",
        (f"{statistics.median(functions):.0f} / {max(functions)}"),
    )
    yield f"functions with a variable {', '.join(VAGUE)}", str(sum(file.vague for file in counts))
    yield "docstrings with a vague opening", str(sum(file.openings for file in counts))


@dataclass
class CallTrace:
    """The calls of this project's functions while it is installed as a profiler."""

    calls: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """A profiler's event, as `sys.setprofile` documents it."""
        code = frame.f_code
        path = Path(code.co_filename)
        is_ours = path.is_relative_to(ROOT) and ".venv" not in path.parts
        if event == "call" and is_ours and code.co_name not in INLINED:
            self.calls[code.co_filename, code.co_name, code.co_firstlineno] += 1

    def row(self) -> str:
        """Files / functions / calls."""
        files = {file for file, _, _ in self.calls}
        return f"{len(files)} / {len(self.calls)} / {self.calls.total():,}"


def traced(step: Callable[[int], object]) -> CallTrace:
    """The trace of the third step."""
    step(0), step(1)
    trace = CallTrace()
    sys.setprofile(trace)
    step(2)
    sys.setprofile(None)
    return trace


def a_step(students: int) -> Callable[[int], object]:
    """A function that trains a small teacher and `students`, given the step's number."""
    from benchmarks.learners import Size, batch_of, student, teacher
    from trainer.step import train_step

    size = Size("tiny", 32, 2, length=32, rows=8, vocabulary=600)
    taught = [student(number, size, 32, 2) for number in range(students)]
    return partial(train_step, teacher(size.encoder, size.rows), taught, batch_of(size))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--words", action="store_true", help="list vague names; 1 if there are any")
    asked = parser.parse_args()
    tree = asked.tree.resolve()
    if asked.words:
        paths = files_of(tree, LEFT_OUT - {"benchmarks"})
        places = [place for path in paths for place in vague_words(path)]
        sys.exit("\n".join(places) or None)
    rows = list(rows_of([count_file(path) for path in files_of(tree)]))
    if tree == ROOT:
        from benchmarks.learners import join_alone

        join_alone()
        for students in (0, 2):
            name = f"a step with {students} students: files / functions / calls"
            rows.append((name, traced(a_step(students)).row()))
    print("| | |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
