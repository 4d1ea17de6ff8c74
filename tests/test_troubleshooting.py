"""Every message that the page on troubleshooting explains is one that the code can print."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.conftest import REPOSITORY
from tests.test_dependencies import FILES

PAGE = (REPOSITORY / "docs/troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.M)
VARIABLE = re.compile(r"\$\{[^}]+\}|\$\w+|%[sd]|`")
FEWEST = 12  # letters that a message has beside its values


def words(text: str) -> list[str | None]:
    """The words of a text around its variables."""
    pieces = VARIABLE.split(text)
    marks = [mark == "`" for mark in VARIABLE.findall(text)] + [True]
    joined: list[str | None] = []
    for piece, is_mark in zip(pieces, marks, strict=True):
        joined += [piece] if is_mark else [piece, None]
    return joined


def of_python(source: str) -> list[list[str | None]]:
    messages: list[list[str | None]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts: list[str | None] = []
            for value in node.values:
                parts += words(str(value.value)) if isinstance(value, ast.Constant) else [None]
            messages.append(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            messages.append(words(node.value))
    return messages


def phrases(text: str) -> set[str]:
    """Four words each that follow each other."""
    words = re.findall(r"\w+", text)
    return set(map(" ".join, zip(words, words[1:], words[2:], words[3:], strict=False)))


@cache
def messages() -> list[list[str | None]]:
    """Words of the texts in files that the page may quote, with None for each value."""
    quoted = phrases(" ".join(MESSAGES))
    sources = [text for path in FILES if quoted & phrases(text := path.read_text())]
    shell = [
        words(text)
        for path in (REPOSITORY / "cluster").glob("*.sh")
        for text in re.findall(r'"([^"\n]{20,})"', path.read_text().replace("\\`", "`"))
    ]
    found = [*(message for source in sources for message in of_python(source)), *shell]
    return [message for message in found if sum(len(part or "") for part in message) >= FEWEST]


def has_form(message: str, parts: list[str | None]) -> bool:
    if max((part.strip() for part in parts if part), key=len) not in message:
        return False
    return bool(
        re.search("".join(".+?" if p is None else re.escape(p.strip("\n")) for p in parts), message)
    )


def can_be_printed(message: str) -> bool:
    return any(has_form(message, parts) for parts in messages())


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_the_code(message):
    assert can_be_printed(message)


def test_a_message_that_nothing_prints_is_noticed():
    assert len(MESSAGES) > 40
    assert not can_be_printed("mine/val: holds nothing at all; build it once more")
