"""What a process that follows a run reads: the rows of its metrics, and the trainer's last word."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from configs.strict_json import parse_json

Row = dict[str, float]


class Tail:
    """Reads a growing ``metrics.jsonl``: each row once, when its line is complete.

    A file that was replaced, when a resumed run truncated it, is read again from the beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def rows(self) -> Iterator[Row]:
        """The rows since the last call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                row = parse_json(line)
                yield {key: float(v) if isinstance(v, str) else v for key, v in row.items()}


class LastWord:
    """What the trainer says at its end: "completed" or "stopped", or nothing if it was killed."""

    def __init__(self) -> None:
        """Wait for a line of standard input, or its end, in a thread."""
        self.ended = threading.Event()
        self.text = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        self.text = sys.stdin.readline().strip()
        self.ended.set()
