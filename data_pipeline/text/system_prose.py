"""A training text of the English prose that every Debian or Ubuntu machine with Python has.

    python -m data_pipeline.text.system_prose --out FILE

Sources, in this order: the Python reference (``pydoc_data.topics``), docstrings of the standard
library, docstrings of the installed packages that this project depends on, and documents under
``/usr/share/doc`` (empty in a minimal container). Markup is removed. Only paragraphs that read
like English sentences are kept, each once. Code, tables, change logs, licenses and boilerplate
that differs only in names are dropped. The same machine always gives the same file.
"""

import argparse
import gzip
import hashlib
import html
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

DOC_ROOT = Path("/usr/share/doc")
PACKAGES = (
    "torch",
    "numpy",
    "transformers",
    "sympy",
    "networkx",
    "huggingface_hub",
    "deepspeed",
    "pydantic",
    "rich",
    "setuptools",
    "tokenizers",
    "wandb",
    "webdataset",
)
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "test", "tests", "testing", "_vendor", "vendor", "site-packages"}
)
DOC_SUFFIXES = frozenset({".txt", ".md", ".rst", ".html", ".htm", ".text"})
SKIPPED_NAMES = re.compile(
    r"(?i)copyright|licen[cs]e|changelog|changes|authors|thanks|news|history"
)
MAX_FILE_BYTES = 4 << 20
MIN_WORDS, MIN_DOCUMENT_WORDS = 8, 30

_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_HTML_DROPPED = re.compile(r"(?is)<(script|style|pre|code|table|nav|head)\b.*?</\1>")
_HTML_BREAK = re.compile(r"(?i)</?(p|div|li|h\d|br|dd|dt|ul|ol|tr|section)\b[^>]*>")
_HTML_TAG = re.compile(r"(?s)<[^>]*>")
_MARKUP = (
    (re.compile(r":[a-z:]+:`~?([^`<]*?)\s*(?:<[^>]*>)?`"), r"\1"),  # rst roles
    (re.compile(r"\[`?([^\]`]+)`?\]\([^)]*\)"), r"\1"),  # markdown links
    (re.compile(r"`([^`<]+?)\s*<[^>]*>`_{0,2}"), r"\1"),  # rst links
    (re.compile(r"`+([^`]*)`+_{0,2}"), r"\1"),
    (re.compile(r"\*\*([^*]+)\*\*"), r"\1"),
    (re.compile(r"(?<!\w)[*_]([^*_\n]+)[*_](?!\w)"), r"\1"),
    (re.compile(r"https?://\S+"), ""),
    (re.compile(r"\[\d+\]_?"), ""),
)
_BULLET = re.compile(r"^\s*(?:[-*+o•]|\(?\d+[.)]|\(?[a-z][.)])\s+")
_PARAGRAPH_BREAK = re.compile(r"\n[ \t]*\n|\n(?=\s*(?:[-*+•]|\d+[.)])\s+\S)")
_CODE = re.compile(r">>>|::\s*$|[{}|\\<>=;$@#~^]|\w\(\)|--\w|\w_\w|\.\.\s|\bdef\b|\bimport\b")
_NAME = re.compile(r"\S*[^\Wa-z]\S*|[^a-z\s]+")
_COMMON = """
the of and to a in is that for it as with be by on are this an or if not which from can at
when will has have was but all you one may must any used
"""
_COMMON_WORDS = frozenset(_COMMON.split())


def gather(sources: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Documents of clean prose from (name, raw text) pairs; no paragraph occurs twice."""
    seen: set[bytes] = set()
    for _, text in sources:
        paragraphs = [paragraph for paragraph in prose(text) if _is_new(paragraph, seen)]
        if sum(len(paragraph.split()) for paragraph in paragraphs) >= MIN_DOCUMENT_WORDS:
            yield "\n".join(paragraphs)


def prose(text: str) -> Iterator[str]:
    """The paragraphs of `text` that read like English, one line each, without markup."""
    for raw in _PARAGRAPH_BREAK.split(text):
        paragraph = _BULLET.sub("", raw)
        for pattern, replacement in _MARKUP:
            paragraph = pattern.sub(replacement, paragraph)
        paragraph = " ".join(paragraph.split())
        if is_english_prose(paragraph):
            yield paragraph


def is_english_prose(paragraph: str) -> bool:
    """Whether a paragraph is made of English sentences rather than code, tables or lists."""
    words = paragraph.split()
    if len(words) < MIN_WORDS or not paragraph[0].isupper() or paragraph[-1] not in ".!?:)\"'":
        return False
    letters = sum(character.isalpha() and character.isascii() for character in paragraph)
    if letters < 0.73 * len(paragraph) or len(_CODE.findall(paragraph)) * 15 > len(words):
        return False
    common = sum(word.lower().strip(".,;:()") in _COMMON_WORDS for word in words)
    return common >= 0.22 * len(words)


def machine_sources() -> Iterator[tuple[str, str]]:
    """(name, raw text) of everything on this machine that may hold prose, in a fixed order."""
    from pydoc_data import topics

    yield from sorted(topics.topics.items())
    paths = sysconfig.get_paths()
    yield from python_sources(Path(paths["stdlib"]))
    for package in PACKAGES:
        yield from python_sources(Path(paths["purelib"]) / package)
    yield from document_sources(DOC_ROOT)


def python_sources(root: Path) -> Iterator[tuple[str, str]]:
    """The docstrings of each Python file under `root`, joined."""
    for path in _files(root):
        if path.suffix == ".py":
            docstrings = _DOCSTRING.findall(_read(path))
            yield str(path), "\n\n".join(docstrings)


def document_sources(root: Path) -> Iterator[tuple[str, str]]:
    """The text of each readable document under `root`: plain, Markdown, reST or HTML, or .gz."""
    for path in _files(root):
        name = path.name.removesuffix(".gz")
        suffix = Path(name).suffix.lower()
        wanted = suffix in DOC_SUFFIXES or name.upper().startswith(("README", "FAQ"))
        if wanted and not SKIPPED_NAMES.search(name):
            text = _read(path)
            yield str(path), _strip_html(text) if suffix in (".html", ".htm") else text


def _files(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if path.is_symlink():
            continue
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS:
                yield from _files(path)
        elif path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
            yield path


def _read(path: Path) -> str:
    """The text of a file; empty if it cannot be read as text."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error):
        return ""


def _strip_html(text: str) -> str:
    text = _HTML_BREAK.sub("\n\n", _HTML_DROPPED.sub(" ", text))
    return html.unescape(_HTML_TAG.sub("", text))


def _is_new(paragraph: str, seen: set[bytes]) -> bool:
    """Whether the paragraph is new, names and numbers aside; adds it to `seen`."""
    skeleton = " ".join(_NAME.sub("", paragraph).split())
    key = hashlib.blake2b(skeleton.encode(), digest_size=12).digest()
    if key in seen:
        return False
    seen.add(key)
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Write this machine's prose to a file and print its size."""
    parser = argparse.ArgumentParser(
        prog="python -m data_pipeline.text.system_prose", description=__doc__
    )
    parser.add_argument("--out", required=True, type=Path, help="the .txt file to write")
    out: Path = parser.parse_args(arguments).out
    if out.exists():
        raise SystemExit(f"{out}: exists; move it away, or choose another --out")
    documents = list(gather(machine_sources()))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    print(f"{out}: {len(documents):,} documents, {out.stat().st_size / 1e6:.1f} MB of prose")


if __name__ == "__main__":
    main()
