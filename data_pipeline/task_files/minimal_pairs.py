"""Minimal pairs of sentences, one of them good: BLiMP's JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.task_files.dropped import Dropped
from data_pipeline.task_files.tables import read_table
from data_pipeline.text.text_files import files_in, suffix_of

SUFFIX = ".jsonl"  # of the files of a folder
SENTENCES = {"good": "sentence_good", "bad": "sentence_bad"}
FACTS = {"paradigm": "UID", "phenomenon": "linguistics_term"}


@dataclass(frozen=True)
class MinimalPair:
    """A good sentence and a bad one, and what they differ in."""

    where: str
    good: str
    bad: str
    paradigm: str  # BLiMP has 67 of them, with 1,000 pairs each
    phenomenon: str  # and 12 of these


def read_minimal_pairs(path: str) -> Iterator[MinimalPair]:
    """The pairs of a file, or of the .jsonl files of a folder and its folders, by name.

    They may be compressed. Files and folders whose names begin with a dot are left out. Raises
    DataError for a file without pairs, and for a pair of equal sentences.
    """
    for file in _files(path):
        dropped = Dropped()
        for where, row in dropped.present(read_table(file, SENTENCES | FACTS)):
            if row["good"] == row["bad"]:
                raise DataError(f"{where}: the good and the bad sentence are the same")
            yield MinimalPair(where, **row)
        dropped.tell(file)


def _files(path: str) -> list[str]:
    if not Path(path).is_dir():
        return [path]
    files = [file for file in map(str, files_in(path)) if suffix_of(file) == SUFFIX]
    if not files:
        raise DataError(f"{path}: holds no {SUFFIX} files")
    return files
