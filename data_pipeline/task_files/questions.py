"""Questions about passages, answered by a span of them (SQuAD) or by a choice (RACE, DREAM).

A file is their authors' JSON, or holds a record for each question, as `datasets` writes them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.task_files.contents import (
    UTF_8,
    parse_json,
    place,
    read_json,
    read_lines,
    source_name,
    text_in,
    texts_in,
    value_in,
)
from data_pipeline.task_files.tables import read_records
from data_pipeline.text.text_files import files_in, suffix_of


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
    if isinstance(record, dict) and type(record.get("id")) is int:  # the row of a table
        record = {**record, "id": str(record["id"])}
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


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class ChoiceQuestion:
    """A question about a passage, its choices, and the index of the right one, if it is read."""

    where: str
    id: str
    passage: str
    question: str
    choices: tuple[str, ...]
    answer: int | None
    is_separated: bool = False

    def texts_with(self, choice: str) -> list[str]:
        """The texts that are read for a choice: the passage, then the question with the choice.

        The choice stands in the question's blank or behind it, as in ALBERT's code for RACE; if
        `is_separated`, it is a text by itself, as in the BERT baseline of DREAM's authors.
        """
        if self.is_separated:
            return [self.passage, self.question, choice]
        if "_" in self.question:
            return [self.passage, self.question.replace("_", choice)]
        return [self.passage, f"{self.question} {choice}"]


def read_multiple_choice(
    path: str, labelled: bool = True, encoding: str = UTF_8
) -> Iterator[ChoiceQuestion]:
    """The questions of a file, or of all files in a folder and its folders, by name.

    Files and folders whose names begin with a dot are left out.
    A file holds DREAM's list of dialogues, a RACE record (or a list of them), or RACE records a
    line each, of a passage or, as `datasets` writes them, of a question. With `labelled` False,
    answers are not read. Raises DataError for a file without questions, an answer that is none of
    the choices, and an id that comes twice, as where RACE's files stand beside one that joins them.
    """
    seen: set[str] = set()
    for file in _files(path):
        for where, record in _records(file, encoding):
            for question in _questions_with_choices(where, record, labelled):
                if len(question.choices) < 2:
                    raise DataError(f"{question.where}: must have two choices or more")
                if question.id in seen:
                    raise DataError(
                        f"{question.where}: the id {question.id} comes twice; remove one of them"
                    )
                seen.add(question.id)
                yield question
    if not seen:
        raise DataError(f"{source_name(path)}: holds no questions")


def _files(path: str) -> list[str]:
    return [*map(str, files_in(path))] if Path(path).is_dir() else [path]


def _records(path: str, encoding: str) -> Iterator[tuple[str, Any]]:
    """(where, record) of each dialogue, passage or question."""
    if suffix_of(path) == ".parquet":
        yield from read_records(path)
        return
    every = list(read_lines(path, encoding))
    lines = [(number, line) for number, line in every if line.strip()]
    if not lines:
        raise DataError(f"{source_name(path)}: is empty")
    if len(lines) > 1 and all(line.startswith("{") for _, line in lines[:2]):
        for number, line in lines:
            yield place(path, number), parse_json(line, path, number)
        return
    document = parse_json("\n".join(line for _, line in every), path, 1)
    for number, record in enumerate(document if isinstance(document, list) else [document], 1):
        yield f"{source_name(path)}: record {number}", record


def _questions_with_choices(where: str, record: Any, labelled: bool) -> Iterator[ChoiceQuestion]:
    if isinstance(record, list):
        yield from _dream(where, record, labelled)
    elif isinstance(record, dict) and "questions" in record:
        yield from _race(where, record, labelled)
    elif isinstance(record, dict) and "question" in record:
        yield from _race(where, _passage_of(where, record), labelled)
    else:
        raise DataError(
            f"{where}: is neither a record of RACE nor a dialogue of DREAM; write records with "
            "article, question, options (a list) and answer (A, B, ...)"
        )


def _passage_of(where: str, question: dict[str, Any]) -> dict[str, Any]:
    """RACE's record of a passage with this question alone, which `datasets` writes.

    Its id has the place too, since all questions of a passage may have one id.
    """
    plural = {"question": "questions", "options": "options", "answer": "answers"}
    lists = {plural[key]: [value] for key, value in question.items() if key in plural}
    name = question.get("example_id", question.get("id", ""))
    return {**question, **lists, "id": f"{name} {where}".lstrip()}


def _race(where: str, record: dict[str, Any], labelled: bool) -> Iterator[ChoiceQuestion]:
    passage, questions = text_in(record, "article", where), texts_in(record, "questions", where)
    options = value_in(record, "options", list, where)
    answers = texts_in(record, "answers", where) if labelled else ("",) * len(questions)
    if not len(questions) == len(options) == len(answers):
        raise DataError(f"{where}: there must be equally many questions, options and answers")
    name = str(record.get("id", where))
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        here = f"{where}: question {number + 1}"
        choices = texts_in({"options": options[number]}, "options", here)
        letters = LETTERS[: len(choices)]
        right = _index(here, letters, answer) if labelled else None
        yield ChoiceQuestion(here, f"{name}-{number}", passage, question, choices, right)


def _dream(where: str, record: list[Any], labelled: bool) -> Iterator[ChoiceQuestion]:
    if len(record) != 3 or not isinstance(record[1], list) or not isinstance(record[2], str):
        raise DataError(f"{where}: must be a list of turns, a list of questions and an id")
    passage = "\n".join(texts_in({"turns": record[0]}, "turns", where))
    for number, asked in enumerate(record[1]):
        here = f"{where}: id {record[2]}, question {number + 1}"
        choices = texts_in(asked, "choice", here)
        right = _index(here, choices, text_in(asked, "answer", here)) if labelled else None
        question = text_in(asked, "question", here)
        name = f"{record[2]}-{number}"
        yield ChoiceQuestion(here, name, passage, question, choices, right, True)


def _index(where: str, choices: tuple[str, ...] | str, answer: str) -> int:
    if not answer or answer not in tuple(choices):
        raise DataError(f"{where}: the answer {answer!r} is none of {', '.join(choices)}")
    return tuple(choices).index(answer)
