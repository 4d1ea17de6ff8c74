"""Tags of the words in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline import DataError
from data_pipeline.examples.example import Windows
from data_pipeline.task_files.conll import TaggedSentence, read_tagged_records, read_untagged
from data_pipeline.task_files.tables import holds_records
from model import decode
from trainer.prediction.predictor import Predictor, Query
from trainer.tasks.tagging import WORD


@dataclass(frozen=True)
class _Words:
    words: tuple[str, ...]
    first_pieces: NDArray[np.int64]  # the number of each word's first piece
    windows: Windows


class TagPredictor(Predictor):
    """Tags each sentence: ``{"words": [...], "tags": [...]}``.

    A sentence that does not fit is read in overlapping windows. The tag of a word is that of the
    window with the most context.
    """

    placed_fields = (WORD,)

    def queries(self, path: str) -> Iterator[Query]:
        room = self.encoder.capacity(1)
        for sentence in self._sentences(path):
            pieces = [self.encoder.word(word) for word in sentence.words]
            sizes = np.array([len(word) for word in pieces], np.int64)
            ids = self.encoder.array([number for word in pieces for number in word])
            windows = Windows(len(ids), room, max(1, room // 2))
            sequences = [[ids[window]] for window in windows] if len(ids) else []
            self.unanswered += not sequences
            yield Query(sequences, _Words(sentence.words, sizes.cumsum() - sizes, windows))

    def _sentences(self, path: str) -> Iterator[TaggedSentence]:
        """Of lists of words, of columns, or of raw text; see `read_untagged`.

        Raises DataError for a column that has no number, where they have no names.
        """
        word = self.facts.columns.get(WORD)
        if holds_records(path):
            key = None if word is None or word.isdecimal() else word
            return read_tagged_records(path, key, labelled=False, encoding=self.facts.encoding)
        if WORD in self.columns and not (word and word.isdecimal() and int(word)):
            raise DataError(f"--column {WORD}={word}: must be the number of a column, from 1")
        number = int(word) if word and word.isdecimal() else None
        has_columns = True if WORD in self.columns else None
        return read_untagged(path, number, self.head.labels, self.facts.encoding, has_columns)

    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        read, tags = query.source, np.zeros(len(query.source.words), np.int64)
        for window, logits in zip(read.windows, outputs, strict=False):
            inside = slice(*np.searchsorted(read.first_pieces, (window.start, window.stop)))
            firsts = read.first_pieces[inside]
            best = read.windows.best_starts[firsts] == window.start
            tags[inside][best] = self._best(logits, firsts - window.start + 1)[best]
        return {"words": list(read.words), "tags": [self.head.labels[tag] for tag in tags]}

    def _best(self, logits: Tensor, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tags of the words whose first pieces are in these places of a sequence."""
        if self.transitions is None or not len(places):
            return logits[places].argmax(dim=-1).numpy()
        chain = torch.zeros(len(logits), dtype=torch.bool)
        chain[places] = True
        return decode(logits[None], self.transitions, chain[None])[0, places].numpy()
