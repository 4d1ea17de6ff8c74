"""Scripts of text, and sentence splitting by rules: no model and no download.

A sentence ends at a line end, or at closing punctuation that is followed by white space and by
something that can begin a sentence. Quotes and brackets may stand after the punctuation. The stops
of other scripts end a sentence whatever follows. The full stops of initials, of numbered references
and of the abbreviations of English and some other languages do not end one. A line that starts in
lower case continues the sentence before it (hard-wrapped text). A sentence longer than
`MAX_CHARACTERS` is cut at weaker punctuation, or at a space.

White space belongs to the sentence after it, so joining the sentences gives the text. Byte-level
tokenizers therefore give the same ids for the sentences as for the whole text.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

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


@cache
def marks() -> str:
    """The characters of words beside letters and digits, for a class of a regular expression.

    Vowel signs and other marks, and joiners, which ``\\w`` lacks.
    """
    return _of_categories("Mn", "Mc", "Me") + "".join(sorted(JOINERS))


@cache
def word_pattern(inner: str, signs: bool = False) -> re.Pattern[str]:
    """The words of a text in any script with spaces; they may hold `inner` between letters.

    With `signs` also each of its other characters that can be seen.
    """
    letters = rf"\w+(?:[{marks()}]\w*)*"
    words = rf"{letters}(?:[{inner}]{letters})*"
    return re.compile(
        rf"{words}|[^\w\s{_of_categories('Cc', 'Cf')}][{marks()}]*" if signs else words
    )


def _of_categories(*categories: str) -> str:
    """The characters of these categories of Unicode."""
    points = (*range(0x1F000), *range(0xE0000, 0xE0200))
    return "".join(chr(point) for point in points if unicodedata.category(chr(point)) in categories)


MAX_CHARACTERS = 1000

# The full stops and question marks of Chinese and Japanese, Hindi, Arabic and Urdu, Armenian,
# Amharic, Burmese, Khmer, Tibetan, Mongolian, Santali and Meitei. Whatever stands behind one begins
# a sentence, also without a space.
OTHER_STOPS = (
    "\u3002\uff01\uff1f\uff61\u0964\u0965\u061f\u06d4\u0589\u1362\u1367\u104b\u17d4\u17d5"
    "\u0f0d\u0f0e\u1803\u1c7e\uabeb"
)
# Commas and semicolons of Chinese and Japanese, Arabic, Burmese and Amharic.
_OTHER_COMMAS = "\uff0c\u3001\uff1b\uff1a\u060c\u061b\u104a\u1363"
_TITLES_AND_SUCH = """
mr mrs ms dr prof rev hon st sr jr messrs mme mlle gen col capt lt sgt maj cmdr adm gov sen rep
pres supt insp vs cf viz eg ie al esp approx dept univ assn bros ave blvd mt ft
jan feb mar apr jun jul aug sept oct nov dec ltd inc corp co
"""
# Of German, French, Spanish, Portuguese, Italian, Dutch, Swedish and Norwegian, Polish, Czech,
# Finnish, Turkish, Russian and Ukrainian: those that no English sentence ends with. Those that
# often end a sentence, such as usw and ecc, are not here.
_OTHER_LANGUAGES = """
bzw vgl evtl ggf bspw inkl zzgl hrsg hr hrn p.ex sra srta dra ud uds exmo exma sig sigg dott avv
dhr mevr bijv t.ex f.eks bl.a tzn tzv např esim bkz örn
ул им стр см проф акад напр ср вул ім див
"""  # noqa: RUF001
_NUMBERED = """
no nos p pp vol vols fig figs eq eqs sec ch chap art c ca ver v b d
nr str bd kap abb abs blz pag pág págs núm
рис табл ст гл с
"""  # noqa: RUF001
ABBREVIATIONS = frozenset((_TITLES_AND_SUCH + _OTHER_LANGUAGES).split())
BEFORE_NUMBER = frozenset(_NUMBERED.split())
LONGEST = max(map(len, ABBREVIATIONS))
_LONGEST_DOTTED = 65  # characters; a longer "A.B.C" is not an abbreviation
_QUOTES = "\"'\u201c\u2018(["
_STOPS = ".!?\u2026"
_SOLID = re.compile(r"\S")
_DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")
_WEAK_BREAKS = (
    re.compile(r"[.!?;:\u2026][\"')\u201d\u2019]*(?=\s)"),
    re.compile(rf",(?=\s)|[{_OTHER_COMMAS}]"),
)


@cache
def _breaks() -> re.Pattern[str]:
    """Stops at which a sentence may end. Its many letters take a tenth of a second to compile.

    The pattern begins with a character class, so that the engine skips other characters quickly.
    It matches a run of stops whole whatever follows, so that the search is linear. The group `next`
    matches if the text after the stops can begin a sentence: with a digit, a capital, or a letter
    of a script that has no capitals.
    """
    beginnings = [
        letter
        for letter in map(chr, range(0x80, 0x3100))
        if letter.isalpha() and not letter.islower()
    ]
    can_begin = "A-Z0-9\u3100-\u9fff\ua000-\ud7a3" + "".join(beginnings)
    return re.compile(
        rf"[.!?\u2026\n{OTHER_STOPS}](?:"
        r"(?<=\n)"
        r"|(?<=[.!?\u2026])[.!?\u2026]*[\"'\u201d\u2019)\]\u00bb]*"
        r"(?:(?=[ \t]+[\"'\u201c\u2018\u201e\u201a(\[\u00ab\u2014\u2013\u00bf\u00a1-]*"
        rf"[{can_begin}])(?P<next>)|)"
        rf"|(?<=[{OTHER_STOPS}])[{OTHER_STOPS}]*[\u300d\u300f\uff09\"'\u201d\u2019)\]\u00bb]*"
        r"(?=[ \t]*\S)"
        r")"
    )


def sentence_ends(text: str) -> list[int]:
    """The character offset at which each sentence of `text` ends; the last is ``len(text)``.

    No sentence is longer than `MAX_CHARACTERS`. None is only white space, unless all of `text` is.
    """
    ends: list[int] = []
    start, solid = 0, first_non_space(text, 0)
    for match in _breaks().finditer(text):
        end = end_at(text, start, solid, match)
        if end is not None:
            ends += [*cuts(text, start, end), end]
            start, solid = end, first_non_space(text, end)
    if solid == len(text) and ends:
        ends[-1] = len(text)
    elif start < len(text):
        ends += [*cuts(text, start, len(text)), len(text)]
    return ends


def first_non_space(text: str, start: int) -> int:
    """The offset of the first character at or after `start` that is not white space."""
    match = _SOLID.search(text, start)
    return match.start() if match else len(text)


def end_at(text: str, start: int, solid: int, match: re.Match[str]) -> int | None:
    """Where a match of `_breaks` ends the sentence; None if the sentence continues.

    The sentence begins at `start`; its first character other than white space is at `solid`.
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
    # "U.S. Army" continues and "in the U.S. The" does not; joining both is the safer error.
    return "." not in word or not _DOTTED.fullmatch(word)


def _continues(text: str, line_end: int) -> bool:
    """Whether the next line continues an unfinished sentence in lower case."""
    after = text[line_end + 1 : line_end + 2]
    return after.islower() and text[line_end - 1 : line_end] not in ".!?:\u2026"


def cuts(text: str, start: int, end: int) -> Iterator[int]:
    """The offsets at which a sentence from `start` to `end` is cut if it is too long."""
    while end - start > MAX_CHARACTERS:
        start = _cut(text, start)
        yield start


def _cut(text: str, start: int) -> int:
    """The best offset at which to cut an overlong sentence, between its quarter and its limit."""
    stop = start + MAX_CHARACTERS
    for pattern in _WEAK_BREAKS:
        cuts = [match.end() for match in pattern.finditer(text, start + MAX_CHARACTERS // 4, stop)]
        if cuts:
            return cuts[-1]
    space = text.rfind(" ", start + 1, stop)
    return space if space > start and not text[start:space].isspace() else stop
