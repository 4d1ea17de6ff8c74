"""Questions with choices about a passage: the JSON of RACE and of DREAM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.task_files.contents import (
    UTF_8,
    parse_json,
    place,
    read_lines,
    source_name,
    text_in,
    texts_in,
    value_in,
)
from data_pipeline.text.text_files import files_in

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
    line each. With `labelled` False, answers are not read. Raises DataError for a file without
    questions, an answer that is none of the choices, and an id that comes twice, as where RACE's
    files stand beside one that joins them.
    """
    seen: set[str] = set()
    for file in _files(path):
        for where, record in _records(file, encoding):
            for question in _questions(where, record, labelled):
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
    """(where, record) of each dialogue or passage."""
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


def _questions(where: str, record: Any, labelled: bool) -> Iterator[ChoiceQuestion]:
    if isinstance(record, list):
        yield from _dream(where, record, labelled)
    elif isinstance(record, dict) and "questions" in record:
        yield from _race(where, record, labelled)
    else:
        raise DataError(f"{where}: is neither a record of RACE nor a dialogue of DREAM")


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
        yield _checked(ChoiceQuestion(here, f"{name}-{number}", passage, question, choices, right))


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
        yield _checked(ChoiceQuestion(here, name, passage, question, choices, right, True))


def _index(where: str, choices: tuple[str, ...] | str, answer: str) -> int:
    if not answer or answer not in tuple(choices):
        raise DataError(f"{where}: the answer {answer!r} is none of {', '.join(choices)}")
    return tuple(choices).index(answer)


def _checked(question: ChoiceQuestion) -> ChoiceQuestion:
    if len(question.choices) < 2:
        raise DataError(f"{question.where}: must have two choices or more")
    return question
