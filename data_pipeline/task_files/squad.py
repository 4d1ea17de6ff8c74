"""Questions about passages, answered by a span of them: the JSON of SQuAD 1.1 and 2.0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.task_files.contents import read_json, source_name
from data_pipeline.task_files.json_records import text_in, value_in


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


def read_squad(path: str, labelled: bool = True) -> Iterator[SpanQuestion]:
    """The questions of a file, in order; with `labelled` False, answers are not read.

    Raises DataError for a file without questions, an id that comes twice, a question without
    answers that is not marked ``is_impossible``, and an answer that is not where it says.
    """
    document, name = read_json(path), source_name(path)
    seen: set[str] = set()
    for article in value_in(document, "data", list, name):
        for paragraph in value_in(article, "paragraphs", list, name):
            context = text_in(paragraph, "context", name)
            for record in value_in(paragraph, "qas", list, name):
                question = _question(record, context, name, labelled)
                if question.id in seen:
                    raise DataError(f"{question.where}: this id comes twice")
                seen.add(question.id)
                yield question
    if not seen:
        raise DataError(f"{name}: holds no questions")


def _question(record: Any, context: str, source: str, labelled: bool) -> SpanQuestion:
    name = text_in(record, "id", source)
    where = f"{source}: id {name}"
    question = text_in(record, "question", where)
    answers = tuple(_answers(record, context, where)) if labelled else ()
    return SpanQuestion(where, name, question, context, answers)


def _answers(record: Any, context: str, where: str) -> Iterator[AnswerSpan]:
    if record.get("is_impossible", False):
        return
    answers = value_in(record, "answers", list, where)
    if not answers:
        raise DataError(f"{where}: has no answers; if the passage has none, is_impossible says so")
    for answer in answers:
        text, start = text_in(answer, "text", where), value_in(answer, "answer_start", int, where)
        found = context[start : start + len(text)] if start >= 0 else ""
        if not text or found != text:
            there = f"{found!r} is there" if found else f"its passage has {len(context)} characters"
            raise DataError(f"{where}: the answer {text!r} is not at character {start}: {there}")
        yield AnswerSpan(text, start)
