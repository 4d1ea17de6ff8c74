"""Questions about passages, answered by a span of them: SQuAD 1.1 and 2.0.

A file is their authors' JSON, or holds a record for each question, as `datasets` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.task_files.contents import (
    UTF_8,
    read_json,
    source_name,
    text_in,
    texts_in,
    value_in,
)
from data_pipeline.task_files.tables import read_records
from data_pipeline.text.text_files import suffix_of


@dataclass(frozen=True)
class AnswerSpan:
    """An answer, which begins at this character of its passage."""

    text: str
    start: int

    @property
    def end(self) -> int:
        """The character after its last."""
        return self.start + len(self.text)


@dataclass(frozen=True)
class SpanQuestion:
    """A question and its passage; without answers, the passage does not answer it (SQuAD 2.0)."""

    where: str
    id: str
    question: str
    context: str
    answers: tuple[AnswerSpan, ...]

    @property
    def is_blank(self) -> bool:
        """Whether it is a blank record, without id, question and passage."""
        return not (self.id or self.question or self.context)

    @property
    def misplaced(self) -> str:
        """The fault of an answer that is not where it says, in words; empty without one."""
        for answer in self.answers:
            text = self.context[max(answer.start, 0) : max(answer.end, 0)]
            if text != answer.text:
                size = f"its passage has {len(self.context)} characters"
                finding = f"{text!r} is there" if text else size
                place = f"is not at character {answer.start}: {finding}"
                return f"{self.where}: the answer {answer.text!r} {place}"
        return ""


def read_squad(path: str, labelled: bool = True, encoding: str = UTF_8) -> Iterator[SpanQuestion]:
    """The questions of a file, in order; with `labelled` False, answers are not read.

    Raises DataError for a file without questions, an id that comes twice, and a question without
    answers in SQuAD's own form that is not marked ``is_impossible``. A blank record is a question
    without a text.
    """
    seen: set[str] = set()
    for question in _questions(path, labelled, encoding):
        if question.id in seen:
            raise DataError(f"{question.where}: this id comes twice")
        if not question.is_blank:
            seen.add(question.id)
        yield question
    if not seen:
        raise DataError(f"{source_name(path)}: holds no questions")


def _questions(path: str, labelled: bool, encoding: str) -> Iterator[SpanQuestion]:
    name = source_name(path)
    if suffix_of(path) in (".jsonl", ".ndjson", ".parquet"):
        records = read_records(path, encoding)
        yield from (_flat(record, where, labelled) for where, record in records)
        return
    document = read_json(path, encoding)
    articles = document if isinstance(document, list) else value_in(document, "data", list, name)
    for number, article in enumerate(articles, 1):
        if isinstance(article, dict) and "context" in article:
            yield _flat(article, f"{name}: record {number}", labelled)
            continue
        for paragraph in value_in(article, "paragraphs", list, name):
            context = text_in(paragraph, "context", name)
            for record in value_in(paragraph, "qas", list, name):
                yield _question(record, context, name, labelled)


def _flat(record: Mapping[str, Any], where: str, labelled: bool) -> SpanQuestion:
    """A question of `datasets`, with its passage; no answers say that the passage has none."""
    if not record:
        return SpanQuestion(where, "", "", "", ())
    context, answers = text_in(record, "context", where), record.get("answers")
    if isinstance(answers, dict):
        texts = texts_in(answers, "text", where)
        starts = value_in(answers, "answer_start", list, where)
        if len(texts) != len(starts):
            raise DataError(f"{where}: answers: text and answer_start must be of one length")
        pairs = zip(texts, starts, strict=True)
        answers = [{"text": text, "answer_start": start} for text, start in pairs]
    given = {**record, "answers": answers, "is_impossible": answers == []}
    return _question(given, context, where, labelled)


def _question(record: Any, context: str, source: str, labelled: bool) -> SpanQuestion:
    name = text_in(record, "id", source)
    where = f"{source}: id {name}"
    question = text_in(record, "question", where)
    answers = tuple(_answers(record, where)) if labelled else ()
    return SpanQuestion(where, name, question, context, answers)


def _answers(record: Any, where: str) -> Iterator[AnswerSpan]:
    impossible = record.get("is_impossible", False)
    if not isinstance(impossible, bool):
        raise DataError(f"{where}: is_impossible: must be true or false, not {impossible!r}")
    if impossible:
        return
    answers = value_in(record, "answers", list, where)
    if not answers:
        raise DataError(
            f"{where}: has no answers; if the passage has none, set is_impossible: true"
        )
    for answer in answers:
        text, start = text_in(answer, "text", where), value_in(answer, "answer_start", int, where)
        if not text:
            raise DataError(f"{where}: an answer is empty")
        yield AnswerSpan(text, start)
