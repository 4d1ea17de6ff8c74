"""Sentence splitting for English-like prose, by rules: no model and no download.

A break is a line end, or closing punctuation (with quotes and brackets after it) before white
space and something that can begin a sentence. Full stops of abbreviations, initials and numbered
references are no breaks. A line that goes on in lower case continues its sentence (hard-wrapped
text), and what is still longer than `MAX_CHARACTERS` is cut at weaker punctuation, or at a space.

White space belongs to the sentence after it, so that the sentences joined are the text, and
byte-level tokenizers give the same ids for the parts as for the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_CHARACTERS = 1000

# A class of characters comes first, which lets the engine skip all others quickly. A run of stops
# is matched whole whatever follows, so that the search is linear; `next` says that a sentence may.
BREAK = re.compile(
    r"[.!?\u2026\n\u3002\uff01\uff1f](?:"
    r"(?<=\n)"
    r"|(?<=[.!?\u2026])[.!?\u2026]*[\"'\u201d\u2019)\]\u00bb]*"
    r"(?:(?=[ \t]+[\"'\u201c\u2018(\[\u00ab\u2014\u2013-]*"
    r"[A-Z0-9\u00c0-\u00de\u0391-\u03a9\u0410-\u042f])(?P<next>)|)"
    r"|(?<=[\u3002\uff01\uff1f])[\u300d\u300f\uff09]*(?=\S)"
    r")"
)
_TITLES_AND_SUCH = """
mr mrs ms dr prof rev hon st sr jr messrs mme mlle gen col capt lt sgt maj cmdr adm gov sen rep
pres supt insp vs cf viz eg ie al esp approx dept univ assn bros ave blvd mt ft
jan feb mar apr jun jul aug sept oct nov dec ltd inc corp co
"""
_NUMBERED = "no nos p pp vol vols fig figs eq eqs sec ch chap art c ca ver v b d"
ABBREVIATIONS = frozenset(_TITLES_AND_SUCH.split())
BEFORE_NUMBER = frozenset(_NUMBERED.split())
LONGEST = max(map(len, ABBREVIATIONS))
_LONGEST_DOTTED = 65  # characters, from where on "A.B.C" is no abbreviation
_QUOTES = "\"'\u201c\u2018(["
_STOPS = ".!?\u2026"
_SOLID = re.compile(r"\S")
_DOTTED = re.compile(r"(?:[A-Za-z]\.)+[A-Za-z]")
_WEAK_BREAKS = (re.compile(r"[.!?;:\u2026][\"')\u201d\u2019]*(?=\s)"), re.compile(r",(?=\s)"))


def sentence_ends(text: str) -> list[int]:
    """The character offset at which each sentence of `text` ends; the last is its length.

    Every sentence holds something other than white space, if the text does. None is longer than
    `MAX_CHARACTERS` characters.
    """
    ends: list[int] = []
    start, solid = 0, first_solid(text, 0)
    for match in BREAK.finditer(text):
        end = end_at(text, start, solid, match)
        if end is not None:
            ends += [*cuts(text, start, end), end]
            start, solid = end, first_solid(text, end)
    if solid == len(text) and ends:
        ends[-1] = len(text)
    elif start < len(text):
        ends += [*cuts(text, start, len(text)), len(text)]
    return ends


def first_solid(text: str, start: int) -> int:
    """Where the first character from `start` on stands that is not white space."""
    match = _SOLID.search(text, start)
    return match.start() if match else len(text)


def end_at(text: str, start: int, solid: int, match: re.Match[str]) -> int | None:
    """Where a sentence ends by a match of `BREAK`; None: it continues.

    It begins at `start`, and its first character other than white space stands at `solid`.
    """
    end = match.end()
    if text[end - 1] == "\n":
        end -= 1
        continues = end <= solid or _continues(text, end)
    elif text[match.start()] in _STOPS and match["next"] is None:
        continues = True
    else:
        continues = text[end - 1] == "." and not _ends_sentence(text, start, match.start())
    return None if continues or end == start else end


def _ends_sentence(text: str, start: int, stop: int) -> bool:
    """Whether the full stop at `stop` ends a sentence rather than an abbreviation."""
    first = max(start, stop - _LONGEST_DOTTED)
    before = max(text.rfind(" ", first, stop), text.rfind("\n", first, stop), first - 1)
    word = text[before + 1 : stop]
    if len(word) > LONGEST and "." not in word:
        return True
    word = word.lstrip(_QUOTES)
    if len(word) == 1 and word.isupper() and word != "I":
        return False  # an initial
    lowered = word.lower()
    if lowered in ABBREVIATIONS:
        return False
    if lowered in BEFORE_NUMBER:
        return not text[stop + 1 : stop + 3].strip().isdigit()
    # "U.S. Army" continues, but so may "in the U.S. The": the safe side is to join.
    return "." not in word or not _DOTTED.fullmatch(word)


def _continues(text: str, line_end: int) -> bool:
    """Whether the line after a line end goes on in lower case an unfinished sentence."""
    after = text[line_end + 1 : line_end + 2]
    return after.islower() and text[line_end - 1 : line_end] not in ".!?:\u2026"


def cuts(text: str, start: int, end: int) -> Iterator[int]:
    """Where a sentence is cut that is too long."""
    while end - start > MAX_CHARACTERS:
        start = _cut(text, start)
        yield start


def _cut(text: str, start: int) -> int:
    """The best place to cut an overlong sentence, in its second half-length."""
    stop = start + MAX_CHARACTERS
    for pattern in _WEAK_BREAKS:
        cuts = [match.end() for match in pattern.finditer(text, start + MAX_CHARACTERS // 4, stop)]
        if cuts:
            return cuts[-1]
    space = text.rfind(" ", start + 1, stop)
    return space if space > start and not text[start:space].isspace() else stop
