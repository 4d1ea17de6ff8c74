"""Compiled loops: when they cannot be cached, and when they are interrupted."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from numba import types
from numba.core.dispatcher import Dispatcher

from data_pipeline.text import sentence_search
from data_pipeline.text.compiled import compiled, interruptible
from data_pipeline.text.joined_text import JoinedText
from tests.conftest import REPOSITORY
from tests.data_pipeline.conftest import make_documents
from tests.waiting import until

OURS = ("benchmarks", "cluster", "commands", "configs", "data_pipeline", "model", "trainer")


def test_what_cannot_be_kept_on_disk_is_compiled_all_the_same() -> None:
    module: dict = {}
    exec("def double(number): return 2 * number", module)  # in no file, so beside none
    assert compiled(module["double"])(21) == 42


def test_the_cache_pickles_no_class_of_this_project() -> None:
    """Otherwise reading it would fail once the class is renamed."""
    sentence_search.find_sentences(
        JoinedText.of([f"One sentence. Another of Mr. Smith {number}." for number in range(3)])
    )
    compiled_ones = [one for one in vars(sentence_search).values() if isinstance(one, Dispatcher)]
    signatures = [signature for one in compiled_ones for signature in one.signatures]
    assert signatures
    assert not [
        argument
        for signature in signatures
        for argument in signature
        if isinstance(argument, types.BaseNamedTuple)
    ]


def names_read(node: ast.AST) -> set[str]:
    """The names that a function's body, or another statement, reads and does not bind itself."""
    parts = node.body if isinstance(node, ast.FunctionDef) else [node]
    inside = [one for part in parts for one in ast.walk(part)]
    names = [one for one in inside if isinstance(one, ast.Name)]
    if not isinstance(node, ast.FunctionDef):
        return {one.id for one in names if isinstance(one.ctx, ast.Load)}
    bound = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
    bound |= {one.id for one in names if isinstance(one.ctx, ast.Store)}
    return {one.id for one in names} - bound


def is_compiled(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(one, ast.Name) and one.id == "compiled" for one in node.decorator_list
    )


def imports_of_ours(tree: ast.Module) -> set[str]:
    """The names that a module imports from this project, or by which it imports parts of it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level or (node.module or "").split(".")[0] in OURS:
                found |= {one.asname or one.name for one in node.names}
        elif isinstance(node, ast.Import):
            ours = [one for one in node.names if one.name.split(".")[0] in OURS]
            found |= {one.asname or one.name.split(".")[0] for one in ours}
    return found


def foreign_names(source: str) -> dict[str, set[str]]:
    """Imports from this project that its compiled functions depend on, by function.

    A global of their own module counts as what its value is computed from.
    """
    tree = ast.parse(source)
    meaning: dict[str, set[str]] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            meaning.setdefault(statement.name, set()).update(names_read(statement))
            continue
        for one in ast.walk(statement):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                meaning.setdefault(one.id, set()).update(names_read(statement))
    found, imported = {}, imports_of_ours(tree)
    for function in filter(is_compiled, ast.walk(tree)):
        assert isinstance(function, ast.FunctionDef)
        reached, left = set[str](), names_read(function)
        while left:
            reached |= left
            left = {name for one in left for name in meaning.get(one, ())} - reached
        found[function.name] = reached & imported
    return found


def test_no_compiled_function_depends_on_what_another_module_defines() -> None:
    """Its machine code would be kept on disk when that changes."""
    found = {
        f"{path.relative_to(REPOSITORY)}, {name}": foreign
        for folder in OURS
        for path in (REPOSITORY / folder).rglob("*.py")
        if "@compiled" in (source := path.read_text(encoding="utf-8"))
        for name, foreign in foreign_names(source).items()
    }
    assert len(found) > 10
    assert not {where: foreign for where, foreign in found.items() if foreign}


@pytest.mark.parametrize(
    ("lines", "foreign"),
    [
        ("@compiled\ndef read(x): return np.int64(x + OWN)", set()),
        ("@compiled\ndef read(THEIRS): return THEIRS", set()),
        ("@compiled\ndef read(x):\n    THEIRS = x\n    return THEIRS", set()),
        ("def read(x): return THEIRS\n@compiled\ndef other(x): return x", set()),
        ("@compiled\ndef read(x): return x + THEIRS", {"THEIRS"}),
        ("@compiled\ndef read(x): return their_function(x)", {"their_function"}),
        ("@compiled\ndef read(x): return theirs.CONSTANT", {"theirs"}),
        ("@compiled\ndef read(x): return trainer.run.CONSTANT", {"trainer"}),
        ("MINE = 2 * THEIRS\n@compiled\ndef read(x): return MINE", {"THEIRS"}),
        ("MINE: int = THEIRS\n@compiled\ndef read(x): return MINE", {"THEIRS"}),
        (
            "@compiled\ndef read(x): return inner(x)\n@compiled\ndef inner(x): return THEIRS",
            {"THEIRS"},
        ),
        ("def made(): return [THEIRS]\nMINE = made()\n@compiled\ndef read(x): return MINE",
         {"THEIRS"}),
    ],
)  # fmt: skip
def test_what_a_compiled_function_depends_on_is_found(lines: str, foreign: set[str]) -> None:
    head = (
        "import numpy as np\nimport trainer.run\nimport model.parts as theirs\n"
        "from data_pipeline.text.compiled import compiled\n"
        "from data_pipeline.text.joined_text import THEIRS, their_function\nOWN = 1\n"
    )
    assert set().union(*foreign_names(head + lines).values()) == foreign


def test_an_interrupt_that_became_a_system_error_is_one_again() -> None:
    def interrupted(by: BaseException) -> None:
        try:
            try:
                raise by
            except BaseException as error:
                raise SystemError("returned a result with an exception set") from error
        except SystemError as error:
            raise SystemError("returned a result with an exception set") from error

    with pytest.raises(KeyboardInterrupt), interruptible():
        interrupted(KeyboardInterrupt())
    with pytest.raises(SystemError), interruptible():
        interrupted(ValueError())


def test_ctrl_c_ends_a_build_with_one_line(tmp_path: Path, tokenizer_dir: Path) -> None:
    """All processes get the signal at once, as from a terminal."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("\n\n".join(make_documents(40000, 7)))
    command = [sys.executable, "-m", "tandem", "data", "build", text]
    process = subprocess.Popen(
        [*command, "--tokenizer", tokenizer_dir, "--out", out, "--workers", "2"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until((out / "train").exists, "the first shard")
    time.sleep(0.7)  # others are at work
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert said.splitlines()[-1] == "tandem: interrupted"
    # Python ends by the signal where that interrupts an `exec` of source text, as in a dataclass.
    assert process.returncode in (1, -signal.SIGINT)
    assert "Traceback" not in said
    assert not (out / "corpus.json").exists()
