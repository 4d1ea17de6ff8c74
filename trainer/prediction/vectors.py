"""The vectors of queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from data_pipeline.task_files.contents import place, read_lines
from data_pipeline.task_files.retrieval import RetrievalText, read_queries
from data_pipeline.text.text_files import STDIN
from trainer.prediction.predictor import Predictor, Query
from trainer.tasks.retrieval import Retrieval


class VectorPredictor(Predictor):
    """``{"query": ..., "vector": [...]}`` of each query; null for a blank one."""

    def queries(self, path: str) -> Iterator[Query]:
        for query in queries_in(path, self._task.numbered_by_order, self.facts.encoding):
            is_blank = not query.text.strip()
            self.unanswered += is_blank
            sequences = [] if is_blank else [self._task.query_sequence(query, self.encoder)]
            yield Query(sequences, query)

    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        vectors = [vector.tolist() for vector in outputs]
        return {"query": query.source.id or None, "vector": vectors[0] if vectors else None}

    @cached_property
    def _task(self) -> Retrieval:
        return self.facts.section(Retrieval)


def queries_in(path: str, numbered_by_order: bool, encoding: str) -> Iterator[RetrievalText]:
    """The queries of a file; of standard input, which has one a line, they are 1, 2, 3, ..."""
    if path != STDIN:
        yield from read_queries(path, numbered_by_order, encoding)
        return
    for number, line in read_lines(path, encoding):
        yield RetrievalText(place(path, number), str(number), line.strip())
