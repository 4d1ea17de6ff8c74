"""Files of tasks in other encodings, in archives, and with fields in nested objects."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from data_pipeline import DataError
from data_pipeline.task_files.collection import Collection
from data_pipeline.task_files.parallel import Languages, read_pairs
from data_pipeline.task_files.questions import read_multiple_choice, read_squad
from data_pipeline.task_files.tables import read_table

WORD = "caf\u00e9"
QUESTION = {"id": "1", "question": WORD, "context": WORD}
ANSWERED = {**QUESTION, "answers": [{"text": WORD, "answer_start": 0}]}
RACE = {"article": WORD, "questions": [WORD], "options": [[WORD, "a"]], "answers": ["A"]}


def table(path: str, encoding: str) -> str:
    return next(read_table(path, {"text": "text"}, encoding=encoding))[1]["text"]


def pair(path: str, encoding: str) -> str:
    columns = {"source": "source", "target": "target"}
    return next(read_pairs(path, columns, Languages("", ""), encoding)).source


def document(path: str, encoding: str) -> str:
    return Collection.read(path, path, encoding=encoding).documents[0].text


READERS = {
    "a.tsv": (f"text\n{WORD}\n", table),
    "a.csv": (f"text\n{WORD}\n", table),
    "a.jsonl": (json.dumps({"text": WORD}, ensure_ascii=False), table),
    "a.json": (json.dumps([{"text": WORD}], ensure_ascii=False), table),
    "pairs.tsv": (f"source\ttarget\n{WORD}\tcoffee\n", pair),
    "squad.json": (
        json.dumps([ANSWERED], ensure_ascii=False),
        lambda path, encoding: next(read_squad(path, encoding=encoding)).question,
    ),
    "race.json": (
        json.dumps(RACE, ensure_ascii=False),
        lambda path, encoding: next(read_multiple_choice(path, encoding=encoding)).passage,
    ),
    "documents.tsv": (f"_id\ttext\n1\t{WORD}\n", document),
}


@pytest.mark.parametrize("name", READERS)
def test_every_format_has_an_encoding(name: str, tmp_path: Path) -> None:
    text, read = READERS[name]
    path = tmp_path / name
    path.write_text(text, encoding="latin-1")
    packed = tmp_path / f"{name}.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(path, name)
    assert read(str(path), "latin-1") == read(str(packed), "latin-1") == WORD
    with pytest.raises(DataError, match="is not UTF-8"):
        read(str(path), "utf-8")


def test_a_field_may_stand_in_a_nested_object(tmp_path: Path) -> None:
    records = [{"doc": {"text": text, "n": {"label": n}}} for n, text in enumerate(["a", "b"])]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    columns = {"text": "doc.text", "label": "doc.n.label"}
    rows = [row for _, row in read_table(str(path), columns)]
    assert rows == [{"text": "a", "label": "0"}, {"text": "b", "label": "1"}]
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "a.parquet")
    assert [row for _, row in read_table(str(tmp_path / "a.parquet"), columns)] == rows
    with pytest.raises(DataError, match=r"columns.text: no column 'doc.txt': txt is not there"):
        list(read_table(str(path), {"text": "doc.txt"}))
    with pytest.raises(DataError, match=r"columns.text: no column 'dok.text'"):
        list(read_table(str(path), {"text": "dok.text"}))
