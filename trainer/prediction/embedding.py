"""The vectors of the texts in a file, and those of queries."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.errors import OptionError
from configs.typed import shown
from data_pipeline import EmptyText, TextEncoder
from data_pipeline.task_files.contents import place, read_lines, read_text
from data_pipeline.task_files.retrieval import RetrievalText, read_queries
from data_pipeline.text.text_files import STDIN, suffix_of
from model import encoder_from_pretrained
from trainer.evaluation.text_vectors import POOLINGS, Vector, own_pooling, scaled, warn_of_decoder
from trainer.prediction import fine_tuned
from trainer.prediction.fine_tuned import Predictor, Query, Segments
from trainer.prediction.texts import read_rows, with_places
from trainer.task_facts import TaskFacts, open_encoder
from trainer.tasks.retrieval import Retrieval

LONGEST = 1 << 13  # tokens that are read of a text by a model that could read any number


class FileEmbedder:
    """An exported model that gives texts a vector each."""

    def __init__(self, folder: Path, pooling: str | None, device: torch.device) -> None:
        """pooling: one of `text_vectors.POOLINGS`; None: the model's own (`own_pooling`).

        Raises ModelError where there is no encoder, DataError where there is no tokenizer, and
        OptionError for another pooling.
        """
        if pooling not in (None, *POOLINGS):
            raise OptionError(f"--pooling: {shown(pooling)}: must be one of {', '.join(POOLINGS)}")
        self.model = encoder_from_pretrained(folder).to(device)
        self.encoder = open_encoder(folder, self.model.config, LONGEST)
        warn_of_decoder(self.model, self.encoder.vocabulary, folder)
        ours = own_pooling(self.model.config) if pooling is None else (pooling, False)
        self.pooling, self.normalises = ours

    @cached_property
    def size(self) -> int:
        """The numbers of a vector."""
        (vector,) = self._vectors([[self.encoder.array([self.encoder.vocabulary.mask])]])
        return len(vector)

    def rows(
        self, path: str, columns: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[Vector | None]:
        """The vector of each row of a file, float32 [size], in order; None of one without a text.

        The file is a table with the column ``text``, or another that `columns` name, or has a text
        a line. Texts that are too long are cut; how many, and how many are missing, is logged.
        Raises DataError for a file that cannot be read.
        """
        unanswered, facts = 0, with_places(TaskFacts(), path).with_columns(columns)
        (field,) = facts.fields
        for some in fine_tuned.sorted_together(read_rows(path, facts), path=path):
            sequences: list[Segments] = []
            for where, row in some:
                segments: Segments = []
                with suppress(EmptyText):
                    segments = self.encoder.sequence([row.get(field, "")], where)
                sequences.append(segments)
            vectors = iter(self._vectors([segments for segments in sequences if segments]))
            unanswered += sequences.count([])
            yield from (next(vectors) if segments else None for segments in sequences)
        fine_tuned.tell_incomplete(path, unanswered, self.encoder)

    def _vectors(self, sequences: list[Segments]) -> list[Vector]:
        vectors = fine_tuned.text_vectors(
            self.model, self.encoder.vocabulary, sequences, self.pooling
        )
        arrays = [vector.numpy().astype(np.float32) for vector in vectors]
        return [scaled(array) for array in arrays] if self.normalises else arrays


class VectorPredictor(Predictor):
    """``{"query": ..., "vector": [...]}`` of each query; null for a blank one."""

    def queries(self, path: str) -> Iterator[Query]:
        for query in queries_in(path, self._task.numbered_by_order, self.facts.encoding):
            segments = segments_of(query, self._task.query_sequence, self.encoder)
            self.unanswered += not segments
            yield Query([segments] if segments else [], query)

    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        vectors = [vector.tolist() for vector in outputs]
        return {"query": query.source.id or None, "vector": vectors[0] if vectors else None}

    @cached_property
    def _task(self) -> Retrieval:
        return self.facts.section(Retrieval)


def segments_of(
    text: RetrievalText,
    read: Callable[[RetrievalText, TextEncoder], Segments],
    encoder: TextEncoder,
) -> Segments:
    """The segments that are `read` of a query or a document; none of one without a token."""
    with suppress(EmptyText):
        return read(text, encoder) if text.text.strip() else []
    return []


def queries_in(path: str, numbered_by_order: bool, encoding: str) -> Iterator[RetrievalText]:
    """The queries of a file; those of plain text, one on each line, are 1, 2, 3, ..."""
    if not is_plain_text(path, encoding):
        yield from read_queries(path, numbered_by_order, encoding)
        return
    for number, line in read_lines(path, encoding):
        yield RetrievalText(place(path, number), str(number), line.strip())


def is_plain_text(path: str, encoding: str) -> bool:
    """Whether queries stand one on each line: in standard input, or in a .txt without TREC's."""
    if path == STDIN:
        return True
    text = read_text(path, encoding) if suffix_of(path) == ".txt" else ""
    return bool(text.strip()) and "<top>" not in text.lower()
