"""Records of a task's file that nothing is learnt from: left out, and counted.

Readers of `task_files` yield a record for every row, so that answer N is about row N. Those that
train drop the blank ones here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from configs.durations import counted
from data_pipeline.task_files.contents import source_name

_log = logging.getLogger(__name__)

SHOWN = 3  # reasons in a message


class Placed(Protocol):
    """A record of a file: where it stands, and whether it holds nothing."""

    @property
    def where(self) -> str: ...

    @property
    def is_blank(self) -> bool: ...


Record = TypeVar("Record", bound=Placed)


class Dropped:
    """Counts what is left out of one file."""

    def __init__(self) -> None:
        self._reasons: dict[str, list[object]] = {}

    def add(self, kind: str, reason: object) -> None:
        """Count a record: of which kind, and where it stands or what is wrong with it.

        `kind` is a singular, such as "blank row" or "row with an ignored label".
        """
        self._reasons.setdefault(kind, []).append(reason)

    def malformed(self, error: Exception) -> None:
        """Count a malformed row; for `read_table`."""
        self.add("malformed row", error)

    def present(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records that are not blank, and count the others."""
        for record in records:
            if record.is_blank:
                self.add("blank row", record.where)
            else:
                yield record

    def tell(self, path: object) -> None:
        """Log how many of each kind the file at `path` has, with the first reasons."""
        for kind, reasons in self._reasons.items():
            first = "; ".join(map(str, reasons[:SHOWN]))
            name = source_name(str(path))
            noun, *rest = kind.partition(" with ")
            rows = counted(len(reasons), kind, "".join([f"{noun}s", *rest]))
            _log.warning("%s: leaves out %s; %s", name, rows, first)


def present(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the records that are not blank, where another pass over the file counts the others."""
    return Dropped().present(records)
