"""Lone surrogates: characters of Python's strings that are no text, and have no UTF-8."""

from __future__ import annotations


def without_surrogates(text: str) -> str:
    """The text with a ? in place of each; they come from JSON escapes and command lines."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
