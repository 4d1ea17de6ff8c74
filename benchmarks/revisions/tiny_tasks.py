"""Small files of examples where shipped tasks name theirs, in the formats that these have."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Section = dict[str, Any]
EXAMPLES = 12  # in each file
SPLITS = {"train": "train.tsv", "validation": "dev.tsv"}  # and where they are if a task names none


def write(root: Path, task: Section, texts: Sequence[str]) -> None:
    """Write each file of examples of a task below `root`, made of the words of `texts`."""
    terms = _terms(task)
    for number, (split, place) in enumerate(places(task).items()):
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        part = texts[number * EXAMPLES :][:EXAMPLES]
        if not terms.keys().isdisjoint(("retrieval", "reranking")):
            _write_collection(path, split, part)
        elif "tagging" in terms:
            tags = {True: "B-X", False: "O"}
            lines = [[f"{word} {tags[len(word) > 4]}" for word in text.split()] for text in part]
            path.write_text("\n\n".join(map("\n".join, lines)), encoding="ascii")
        elif "span" in terms or "multiple_choice" in terms:
            _write_questions(path, part, is_span="span" in terms)
        elif "translation" in terms and path.suffix == ".gz":
            for file in (path, path.with_name(path.name.replace(".de", ".en"))):
                file.write_bytes(gzip.compress("\n".join(part).encode()))
        else:
            _write_table(path, part, task["data"].get("columns", {}), _labels(terms))


def sentences(text: str) -> list[str]:
    """The first words of the lines of a text, so few that two of them fit a sequence."""
    lines = (re.sub(r"[^A-Za-z ]", " ", line).split()[:4] for line in text.splitlines())
    return [" ".join(words) for words in lines if len(words) == 4 and len("".join(words)) < 20]


def places(task: Section) -> dict[str, str]:
    """The files of examples of a task by what they are, below ``data.root``."""
    data = task["data"]
    named = {key: data.get(key) for key in ("train", "validation", "test")} | data.get("files", {})
    named |= {"candidates": "run.txt"} if "reranking" in _terms(task) else {}
    given = {key: SPLITS[key] if place == "???" else place for key, place in named.items()}
    return {key: place for key, place in given.items() if place is not None}


def parts(task: Section) -> dict[str, str]:
    """The shipped tasks that a task consists of, by the names that it gives them."""
    return task.get("tasks", {} if "train" in task["data"] else {"sst2": "sst2", "mrpc": "mrpc"})


def overrides(task: Section) -> Section:
    """The keys by which a job reads the files of `places`."""
    if "train" not in task["data"]:
        return {"tasks": parts(task)}
    keys = {
        f"data.{key}" if key in ("train", "validation", "test") else f"data.files.{key}": place
        for key, place in places(task).items()
    }
    fraction = {"data.validation_fraction": 0.25} if "validation_fraction" in task["data"] else {}
    return keys | fraction  # that of the task holds out none of so few examples


def _terms(task: Section) -> Section:
    """The terms of all learners by name."""
    learners = [task["teacher"], *task.get("students", {}).values()]
    objectives = [learner.get("objective", {}) for learner in learners]
    return {name: term for terms in objectives for name, term in terms.items() if term is not None}


def _labels(terms: Section) -> list[str]:
    """Two classes, lists of them, or numbers."""
    targets = {term.get("target") for term in terms.values()}
    if "number" in targets or "bi_encoder" in terms:
        return [f"0.{number % 5}" for number in range(EXAMPLES)]
    classes = ['["a"]', '["b"]'] if "labels" in targets else ["a", "b"]
    return classes * (EXAMPLES // 2)


def _write_table(path: Path, texts: Sequence[str], columns: Section, labels: Sequence[str]) -> None:
    """Tab-separated, with a header unless columns are numbers."""
    cells = {"text": texts, "text_a": texts, "text_b": texts[::-1], "label": labels}
    cells |= {"source": texts, "target": texts[::-1]}
    by_column = {columns.get(field, field): values for field, values in cells.items()}
    if all(str(column).isdecimal() for column in columns.values()) and columns:
        by_column = {n: by_column.get(n, texts) for n in range(1, max(columns.values()) + 1)}
        header = []
    else:
        header = [tuple(by_column)]
    rows = ["\t".join(row) for row in (*header, *zip(*by_column.values(), strict=True))]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def _write_questions(path: Path, texts: Sequence[str], is_span: bool) -> None:
    """In the format of SQuAD, or of DREAM or, in a folder, of RACE."""
    records: list[Any] = []
    for number, text in enumerate(texts):
        words, name = text.split(), f"high{number}"
        asked = {"id": name, "question": "which word is it", "choice": words[:3]}
        answer = words[number % 3]
        if is_span:
            answers = [{"text": answer, "answer_start": text.index(answer)}]
            records.append({"context": text, "qas": [{**asked, "answers": answers}]})
        else:
            records.append([[text], [{**asked, "answer": answer}], name])
    if not path.suffix:
        path.mkdir(exist_ok=True)
        path /= "questions.json"
    squad = {"version": "1.1", "data": [{"title": "", "paragraphs": records}]}
    path.write_text(json.dumps(squad if is_span else records), encoding="utf-8")


def _write_collection(path: Path, split: str, texts: Sequence[str]) -> None:
    """Documents and queries, as tables or with TREC's tags; judgements, and a first stage's run."""
    ids = range(1, EXAMPLES + 1)
    if split in ("documents", "queries") and path.suffix == ".xml":
        form = "<top><num>{}</num><title>{}</title></top>"
        if split == "documents":
            form = "<doc><docno>{}</docno><text>{}</text></doc>"
        lines = [form.format(number, text) for number, text in zip(ids, texts, strict=True)]
    elif split in ("documents", "queries"):
        pairs = zip(ids, texts, strict=True)
        lines = [json.dumps({"_id": str(number), "text": text}) for number, text in pairs]
    elif split == "candidates":
        lines = [f"{q} Q0 {1 + (q + d) % EXAMPLES} {d} {1 / d} x" for q in ids for d in (1, 2, 3)]
    else:
        lines = [f"{query} 0 {query} 1" for query in ids]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
