"""Scripts of text, and those that put no spaces between words."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping

OTHERS = "other characters"
# Format characters that carry meaning: Persian and the scripts of India spell words with them.
JOINERS = {"\u200c", "\u200d"}
_NO_TEXT = ("C", "Z")  # categories: control, format, unassigned; white space
# Written without spaces between words, of several characters each.
SPACELESS = {"Thai", "Lao", "Khmer", "Myanmar", "Hiragana", "Katakana", "Katakana-hiragana"}
_CHARACTERS = {"Han"}  # without spaces too, but BERT takes each character for a word
MOST_SPACELESS = 0.05  # of the letters of a text whose words stand between spaces


def script_of(character: str) -> str:
    """The name of a letter's or mark's script, `OTHERS` for other text, empty for what is none."""
    category = unicodedata.category(character)
    if character in JOINERS:
        return "joiners"
    if category.startswith(_NO_TEXT) or character == "\ufffd":
        return ""
    if not category.startswith(("L", "M")):
        return OTHERS
    first = unicodedata.name(character, OTHERS).split()[0]
    return {"CJK": "Han", "COMBINING": "combining marks"}.get(first, first.capitalize())


def shares_of(counts: Mapping[str, int]) -> dict[str, float]:
    """The share of each script among all letters, in falling order."""
    letters = Counter({script: counts[script] for script in counts if script not in ("", OTHERS)})
    return {script: count / letters.total() for script, count in letters.most_common()}


def spaceless_share(texts: Iterable[str]) -> tuple[float, str] | None:
    """The share of letters that are of scripts without spaces, and the first of these scripts.

    None for texts whose words can be found between spaces.
    """
    counts: Counter[str] = Counter()
    for character, count in Counter("".join(texts)).items():
        counts[script_of(character)] += count
    shares = {
        script: share
        for script, share in shares_of(counts).items()
        if script in SPACELESS | _CHARACTERS
    }
    total = sum(shares.values())
    return (total, next(iter(shares))) if total > MOST_SPACELESS else None
