"""Documents that are nearly alike: ``tandem data build --near-duplicates``.

Two documents are compared by the sets of their runs of five words. A MinHash of `datasketch`
estimates how many of the runs of both they share (Jaccard similarity). Documents are compared with
earlier ones that were kept, in order, so that the result depends only on the text and its order.
Pairs to compare are found by locality-sensitive hashing: they agree in a band of the signature.
"""

import json
import re
import unicodedata
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.hashing import DuplicateDraw, array_keys, scalar_key
from data_pipeline.text.documents import Problem

SIGNATURES = "signatures.bin"  # `RECORD`s of a part's documents, for the merge
LIST = "near_duplicates.jsonl"  # the documents that were dropped
HASHES = 128  # of a signature; the estimate's standard error is at most 4.4%
RUN = 5  # words
MOST_AT_ONCE = 1 << 16  # runs; the library needs 512 bytes for each
RECALL = 0.99  # at the threshold; more alike documents are found more surely
BEGINNING = 120  # bytes of a document's text in the list
RECORD = np.dtype(
    [
        ("signature", "<u4", (HASHES,)),
        ("file", "<u4"),
        ("position", "<u8"),
        ("is_row", "?"),
        ("beginning", f"S{BEGINNING}"),
    ]
)
# Each letter counts as a word where no spaces are written: Thai, Lao, Burmese, Khmer, kana, Han.
_SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)


class Signer:
    """Makes the `RECORD`s of documents, whose file is filled in later."""

    def __init__(self) -> None:
        self._empty = _minhash()
        self._words = _words()

    def __call__(self, texts: Sequence[str], places: Sequence[Problem]) -> NDArray[np.void]:
        """[documents] records of texts that were found at these places."""
        records = np.zeros(len(texts), RECORD)
        for record, text, place in zip(records, texts, places, strict=True):
            record["signature"] = self._signature(text)
            record["position"], record["is_row"] = place.position, place.is_row
            record["beginning"] = " ".join(text[:BEGINNING].split()).encode()[:BEGINNING]
        return records

    def _signature(self, text: str) -> NDArray[np.uint32]:
        minhash = self._empty.copy()
        runs = self._runs(text)
        for at in range(0, len(runs), MOST_AT_ONCE):
            minhash.update_batch(runs[at : at + MOST_AT_ONCE])
        return minhash.hashvalues

    def _runs(self, text: str) -> list[int]:
        """A 32-bit hash of each run of words; of all words where there are no five."""
        plain = unicodedata.normalize("NFKC", text).casefold()
        words = self._words.findall(plain) or [plain]
        hashes = np.array([zlib.crc32(word.encode()) for word in words], np.int64)
        size = min(RUN, len(hashes))
        windows = [hashes[at : len(hashes) - size + 1 + at] for at in range(size)]
        return np.unique(array_keys(scalar_key(size), *windows).astype(np.uint32)).tolist()


class NearDuplicates:
    """The documents that were kept so far, and those that were dropped."""

    def __init__(self, threshold: float) -> None:
        _minhash()  # without the library a build ends here, before it writes anything
        self.dropped: list[dict[str, Any]] = []  # the lines of `LIST`
        self._threshold = threshold
        self._bands, self._rows = bands_for(threshold)
        self._kept: list[tuple[np.void, str]] = []
        # The first document of each band, and the others of the few bands that have several.
        self._by_band: dict[int, int] = {}
        self._others: dict[int, list[int]] = {}

    def is_new(self, record: np.void, path: str) -> bool:
        """Whether no document that was kept is like this one, which then is kept."""
        keys = self._keys(record["signature"])
        candidates = {self._by_band[key] for key in keys if key in self._by_band}
        candidates.update(*(self._others.get(key, ()) for key in keys))
        likeness, number = max(
            ((self._likeness(record, number), -number) for number in candidates), default=(0.0, 0)
        )
        if likeness >= self._threshold:
            kept = _origin(*self._kept[-number])
            dropped = {**_origin(record, path), "similarity": round(likeness, 3), "kept": kept}
            self.dropped.append(dropped)
            return False
        for key in keys:
            if self._by_band.setdefault(key, number := len(self._kept)) != number:
                self._others.setdefault(key, []).append(number)
        self._kept.append((record, path))
        return True

    def write(self, path: Path) -> None:
        """Write the list of the documents that were dropped."""
        lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in self.dropped)
        # A file's name may hold bytes that are no UTF-8: the escapes are those of JSON.
        path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")

    def _keys(self, signature: NDArray[np.uint32]) -> list[int]:
        bands = signature[: self._bands * self._rows].reshape(self._bands, self._rows)
        columns = bands.T.astype(np.int64)
        key = scalar_key(DuplicateDraw.BAND)
        return array_keys(key, np.arange(self._bands), *columns).tolist()

    def _likeness(self, record: np.void, number: int) -> float:
        """The estimated similarity to a document that was kept."""
        return float(np.mean(record["signature"] == self._kept[number][0]["signature"]))


def bands_for(threshold: float) -> tuple[int, int]:
    """(bands, hashes of each): the longest bands that find alike documents with `RECALL`."""
    shapes = [(HASHES // rows, rows) for rows in range(1, HASHES + 1)]
    enough = [
        (bands, rows) for bands, rows in shapes if 1 - (1 - threshold**rows) ** bands >= RECALL
    ]
    return enough[-1]


def records_in(data: bytes) -> NDArray[np.void]:
    """[documents] the records of a file of `SIGNATURES`."""
    return np.frombuffer(data, RECORD)


def _origin(record: np.void, path: str) -> dict[str, Any]:
    """Where a document is, and how it begins."""
    position = int(record["position"])
    place = {"row": position + 1} if record["is_row"] else {"byte": position}
    text = record["beginning"].decode(errors="ignore")
    return {"file": path, **place, "text": text}


def _minhash():  # type: ignore[no-untyped-def]
    try:
        from datasketch import MinHash
    except ImportError:
        raise DataError(
            "datasketch: is missing, and --near-duplicates needs it: pip install "
            "'tandem-distill[duplicates]'"
        ) from None
    return MinHash(HASHES, seed=1, hashfunc=int, scheme="affine32")


@cache
def _words() -> re.Pattern[str]:
    """Letters, marks and digits between white space and punctuation."""
    others = (
        character
        for character in map(chr, range(0x10000))
        if unicodedata.category(character)[0] in "PSZC"
    )
    between = "".join(map(re.escape, others))
    return re.compile(f"[{_SPACELESS}]|[^{_SPACELESS}{between}]+")
