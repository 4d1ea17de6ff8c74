"""Predicted words: tags of the words of sentences, answer spans in passages, translations."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.errors import OptionError
from data_pipeline import MASKED, EmptyText, TextEncoder
from data_pipeline.examples.example import Windows
from data_pipeline.reading.batches import filled
from data_pipeline.task_files.conll import TaggedSentence, read_tagged_records, read_untagged
from data_pipeline.task_files.parallel import SOURCE, read_sources
from data_pipeline.task_files.questions import SpanQuestion, read_squad
from data_pipeline.task_files.tables import holds_records
from model import Model, decode
from trainer.batches import rows_by_length
from trainer.objectives.task import TaskFile
from trainer.prediction import fine_tuned
from trainer.prediction.fine_tuned import Predictor, Query
from trainer.scoring.span_metric import SpanMetric, best_answers, window_rows
from trainer.task_facts import TaskFacts, open_encoder
from trainer.tasks.span import ReadQuestion, Span
from trainer.tasks.tagging import WORD
from trainer.tasks.translation import Translation


@dataclass(frozen=True)
class _Words:
    words: tuple[str, ...]
    first_pieces: NDArray[np.int64]  # the number of each word's first piece
    windows: Windows


class TagPredictor(Predictor):
    """Tags each sentence: ``{"words": [...], "tags": [...]}``.

    A sentence that does not fit is read in overlapping windows. The tag of a word is that of the
    window with the most context. The tags are null in a row without words.
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

        Raises OptionError for a column that has no number, where they have no names.
        """
        word = self.facts.columns.get(WORD)
        if holds_records(path):
            key = None if word is None or word.isdecimal() else word
            return read_tagged_records(path, key, labelled=False, encoding=self.facts.encoding)
        if WORD in self.columns and not (word and word.isdecimal() and int(word)):
            raise OptionError(f"--column {WORD}={word}: must be the number of a column, from 1")
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
        names = [self.head.labels[tag] for tag in tags] if query.sequences else None
        return {"words": list(read.words), "tags": names}

    def _best(self, logits: Tensor, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tags of the words whose first pieces are in these places of a sequence."""
        if self.transitions is None or not len(places):
            return logits[places].argmax(dim=-1).numpy()
        chain = torch.zeros(len(logits), dtype=torch.bool)
        chain[places] = True
        return decode(logits[None], self.transitions, chain[None])[0, places].numpy()


@dataclass(frozen=True)
class _Windows:
    question: SpanQuestion
    read: ReadQuestion | None  # None: there is no text


class SpanPredictor(Predictor):
    """Answers each question with ``{"id", "answer", "start", "score"}``.

    Where questions may be unanswerable, the score of "no answer" is added. The answer and its start
    are null if that score is higher by more than the threshold found in training (default 0), and
    all is null where there is no question or no passage.
    """

    def queries(self, path: str) -> Iterator[Query]:
        for question in read_squad(path, False, self.facts.encoding):
            read = None
            with suppress(EmptyText):
                read = self._task.read(question, self.encoder)
            if read is None:
                self.unanswered += 1
                yield Query([], _Windows(question, None))
                continue
            asked = self.encoder.array(read.asked)
            windows = [self.encoder.array(read.ids[window]) for window in read.windows]
            yield Query([[asked, window] for window in windows], _Windows(question, read))

    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        question, task = query.source.question, self._task
        keys = ["answer", "start", "score", *["no_answer_score"] * task.unanswerable]
        if not outputs:
            return {"id": question.id or None, **dict.fromkeys(keys)}
        rows = torch.cat(list(self._rows(query.source.read, outputs)))
        best = best_answers(rows.numpy(), [question.context])[0]
        known = self.facts.scores.get(SpanMetric.threshold(task.head), 0.0)
        given = best.given(known if task.unanswerable else None)
        span = (given.text, given.start) if given else (None, None)
        values = (*span, best.score, best.no_answer)
        return {"id": question.id, **dict(zip(keys, values, strict=False))}

    def _rows(self, read: ReadQuestion, outputs: Sequence[Tensor]) -> Iterator[Tensor]:
        """The best span of each window."""
        for window, logits in zip(read.windows, outputs, strict=True):
            begins = torch.from_numpy(read.begins_in(window))[None]
            ends = torch.from_numpy(read.ends[window])[None]
            at_tokens = logits[None, read.first_column : read.first_column + begins.shape[1]]
            none = logits[:1].sum(dim=1)
            number = torch.zeros(1)
            yield window_rows(number, at_tokens, none, begins, ends, self._task.longest_answer)

    @cached_property
    def _task(self) -> Span:
        return self.facts.section(Span)


AT_ONCE = 1024  # fewer than of a head's outputs, as a search takes longer


def translations(
    folder: Path,
    model: Model,
    path: str,
    device: torch.device,
    columns: Mapping[str, str],
    encoding: str | None = None,
) -> Iterator[dict[str, Any]]:
    """``{"translation": ...}`` of each text in a file, in order, searched as in training.

    An empty text has null for it, and is counted. Raises DataError for a file that cannot be read.
    """
    facts = TaskFacts.read(folder, MASKED).with_columns(columns).in_encoding(encoding)
    task = facts.section(Translation)
    encoder = open_encoder(folder, model.config, facts.sequence_length)
    column = TaskFile(Path(path), facts.columns).columns_of(SOURCE)
    texts, unanswered = read_sources(path, column, facts.encoding), 0
    for some in fine_tuned.sorted_together(texts, AT_ONCE, path):
        sources = [_encoded(encoder, text, where) for where, text in some]
        unanswered += sources.count([])
        read = [source for source in sources if source]
        searched = iter(_searched(model, task, encoder, read, device))
        for source in sources:
            translation = encoder.tokenizer.decode(next(searched)) if source else None
            yield {"translation": translation}
    fine_tuned.tell_incomplete(path, unanswered, encoder)


def _encoded(encoder: TextEncoder, text: str, where: str) -> list[int]:
    """The tokens of a text; none of one that has none."""
    with suppress(EmptyText):
        return encoder.sequence([text], where)[0].tolist()
    return []


@torch.inference_mode()
def _searched(
    model: Model,
    task: Translation,
    encoder: TextEncoder,
    sources: list[list[int]],
    device: torch.device,
) -> list[list[int]]:
    """The translation of each source, texts of similar length together."""
    vocabulary = encoder.vocabulary
    translations: list[list[int]] = [[]] * len(sources)
    lengths = [len(source) + 2 for source in sources]
    for rows in rows_by_length(lengths, max(1, fine_tuned.tokens_per_pass(device) // task.beams)):
        read = [[vocabulary.cls, *sources[row], vocabulary.sep] for row in rows]
        ids = torch.from_numpy(filled(read, vocabulary.pad))
        sizes = torch.tensor([lengths[row] for row in rows], device=device)
        texts = task.search(model, vocabulary, ids.to(device), sizes)
        for row, translation in zip(rows, texts, strict=True):
            translations[row] = translation
    return translations
