"""The tags of hashes: each form of key has every number once, and no number ever changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import pytest

from data_pipeline import hashing

FOLDER = Path(hashing.__file__).parent
# What the runs of all versions have read depends on these numbers.
NUMBERS = {
    "TextDraw": {"SHARDS": 1, "BLOCKS": 2, "SEQUENCES": 3, "PAIRS": 4},
    "ExampleDraw": {"BLOCKS": 4, "EXAMPLES": 5, "BATCHES": 6, "TASKS": 7},
    "MaskChoice": {"TEXT": 11, "VIEW": 14, "REPLACED": 16},
    "MaskDraw": {"ACTION": 12, "REPLACEMENT": 13, "NGRAM": 14, "OTHER": 17},
    "TeacherDraw": {"TOKENS": 15},
    "PackingDraw": {"SHORT": 21},
    "PairDraw": {"SPLIT": 31, "LABEL": 32, "TIE_BREAK": 33},
    "HeldOutDraw": {"EXAMPLE": 1},
    "PerturbationDraw": {"CHANGED": 1, "CHOSEN": 2, "CUT": 3},
    "ReplacementDraw": {"REPLACED": 1, "CHOSEN": 2},
    "LineDraw": {"SAMPLE": 1},
    "DuplicateDraw": {"BAND": 1},
}


def forms() -> dict[str, type[IntEnum]]:
    """The classes of tags, by name."""
    found = {name: one for name, one in vars(hashing).items() if isinstance(one, type)}
    return {
        name: one
        for name, one in found.items()
        if issubclass(one, IntEnum) and one.__module__ == hashing.__name__
    }


def test_tags_keep_their_numbers() -> None:
    found = {
        name: {tag: int(member) for tag, member in form.__members__.items()}
        for name, form in forms().items()
    }
    assert found == NUMBERS


@pytest.mark.parametrize("form", forms().values())
def test_a_form_of_key_has_each_number_once(form: type[IntEnum]) -> None:
    numbers = [int(member) for member in form.__members__.values()]  # aliases included
    assert len(set(numbers)) == len(numbers)


def test_no_other_file_has_tags_of_its_own() -> None:
    """A constant in a key would be a tag that `forms` does not know."""
    code = "key = scalar_key(seed, TAG, epoch)\nkeys = array_keys(3, numbers)\n"
    assert [*constants_in_keys(code)] == ["TAG", "3"]
    for path in FOLDER.rglob("*.py"):
        assert not [*constants_in_keys(path.read_text(encoding="utf-8"))], path


def constants_in_keys(code: str) -> Iterator[str]:
    """The integers and the constants of its own module that a module hashes."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("scalar_key", "array_keys"):
            yield from (ast.unparse(one) for one in node.args if _is_constant(one))


def _is_constant(argument: ast.expr) -> bool:
    is_name = isinstance(argument, ast.Name) and argument.id.isupper()
    return is_name or isinstance(argument, ast.Constant)
