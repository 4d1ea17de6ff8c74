"""Tags of the words in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_pipeline.task_files.conll import TaggedSentence, read_tagged_records, read_untagged
from data_pipeline.task_files.tables import holds_records
from model import decode
from trainer.prediction.predictor import Predictor, Query


@dataclass(frozen=True)
class _Words:
    words: tuple[str, ...]
    first_pieces: list[int]  # the position of the first piece of each word that fits


class TagPredictor(Predictor):
    """Tags each sentence: ``{"words": [...], "tags": [...]}``, null for words that did not fit."""

    def queries(self, path: str) -> Iterator[Query]:
        for sentence in self._sentences(path):
            if not sentence.words:
                yield Query([], _Words((), []))
                continue
            pieces = [self.encoder.word(one) for one in sentence.words]
            ends = np.cumsum([len(one) for one in pieces])
            fit = int((ends <= self.encoder.capacity(1)).sum())
            ids = self.encoder.array([number for one in pieces[:fit] for number in one])
            firsts = [1 + int(end) - len(one) for end, one in zip(ends, pieces[:fit], strict=False)]
            yield Query([[ids]], _Words(sentence.words, firsts))

    def _sentences(self, path: str) -> Iterator[TaggedSentence]:
        """Of lists of words, of columns, or of raw text; see `read_untagged`."""
        word = self.facts.columns.get("word")
        if holds_records(path):
            key = None if word is None or word.isdecimal() else word
            return read_tagged_records(path, key, labelled=False, encoding=self.facts.encoding)
        number = int(word) if word and word.isdecimal() else 1
        return read_untagged(path, number, self.head.labels, self.facts.encoding)

    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        read = query.source
        if not outputs:
            return {"words": [], "tags": []}
        (logits,) = outputs
        tags = [self.head.labels[number] for number in self._best(logits, read.first_pieces)]
        missing = len(read.words) - len(tags)
        return {"words": list(read.words), "tags": [*tags, *[None] * missing]}

    def _best(self, logits: Tensor, first_pieces: list[int]) -> list[int]:
        if self.transitions is None:
            return logits[first_pieces].argmax(dim=-1).tolist()
        chain = torch.zeros(len(logits), dtype=torch.bool)
        chain[first_pieces] = True
        return decode(logits[None], self.transitions, chain[None])[0, first_pieces].tolist()
