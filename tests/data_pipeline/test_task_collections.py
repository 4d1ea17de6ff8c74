"""Multiple choice, retrieval and minimal pairs: reading, and refusals in one line."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data_pipeline import DataError
from data_pipeline.task_files.questions import ChoiceQuestion, read_multiple_choice
from data_pipeline.task_files.retrieval import (
    Judgement,
    RetrievalText,
    read_judgements,
    read_queries,
    read_retrieval_documents,
)
from trainer.evaluation.minimal_pairs import read_minimal_pairs

RACE = {
    "id": "high1.txt",
    "article": "Ann sold the house.",
    "questions": ["Who sold it?", "What was sold?"],
    "options": [["Bob", "Ann"], ["a house", "a car", "a dog"]],
    "answers": ["B", "A"],
}
DREAM = [
    [["M: Tea?", "W: No."], [{"question": "Tea?", "choice": ["yes", "no"], "answer": "no"}], "4"]
]
PAIR = {
    "sentence_good": "Who sings?",
    "sentence_bad": "Who sing?",
    "UID": "agreement_1",
    "linguistics_term": "agreement",
    "pairID": "0",
}
TREC = """<DOC>
<DOCNO> FT911-3 </DOCNO>
<HEADLINE>Not asked for</HEADLINE>
<TITLE>Lift &amp; drag</TITLE>
<TEXT>
<P>Lift at M < 3 & R > 2.</P>
<P>Drag.</P>
</TEXT>
</DOC>
<doc><docno>2</docno><title></title><text>wings</text></doc>
"""
TOPICS = """<top>
<num> Number: 301
<title> Topic: organized crime

<desc> Description:
Which organizations?
</top>
<top><num> 7</num><title>
slipstream
wings</title></top>
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    def written(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return written


def test_race_in_each_of_its_forms(write: Callable[[str, str], str], tmp_path: Path) -> None:
    line = json.dumps(RACE)
    one, two = read_multiple_choice(write("high1.txt", line))
    assert (one.passage, one.question, one.choices) == (
        RACE["article"],
        "Who sold it?",
        ("Bob", "Ann"),
    )
    assert ((one.id, one.answer), (two.id, two.answer)) == (("high1.txt-0", 1), ("high1.txt-1", 0))
    assert one.where.endswith("high1.txt: record 1: question 1")
    records = [RACE | {"id": f"high{number}.txt"} for number in range(2, 6)]
    assert len([*read_multiple_choice(write("a.json", json.dumps(records[:2], indent=2)))]) == 4
    third, fourth = map(json.dumps, records[2:])
    lines = [*read_multiple_choice(write("a.jsonl", f"{third}\n\n{fourth}\n"))]
    assert lines[2].where.endswith("a.jsonl:3: question 1")
    write(".DS_Store", "\0")
    (tmp_path / ".cache").mkdir()
    write(".cache/a.txt", "\0")
    assert len([*read_multiple_choice(str(tmp_path))]) == 2 + 4 + 4
    assert next(read_multiple_choice(str(tmp_path), labelled=False)).answer is None
    write("all.txt", line)
    with pytest.raises(DataError, match=r"high1.txt: record 1.*: the id high1.txt-0 comes twice"):
        [*read_multiple_choice(str(tmp_path))]


def test_race_as_datasets_writes_it(write: Callable[[str, str], str]) -> None:
    """A record for each question, and the passage's name in all of its records."""
    passage = list(read_multiple_choice(write("high7.txt", json.dumps(RACE))))
    asked = zip(RACE["questions"], RACE["options"], RACE["answers"], strict=True)
    records = [
        {"example_id": "high7.txt", "article": RACE["article"]}
        | {"question": question, "options": options, "answer": answer}
        for question, options, answer in asked
    ]
    rows = list(read_multiple_choice(write("train.jsonl", "\n".join(map(json.dumps, records)))))
    assert len({row.id for row in rows}) == 2
    assert rows == [
        dataclasses.replace(question, id=row.id, where=row.where)
        for question, row in zip(passage, rows, strict=True)
    ]
    assert all(row.id.startswith("high7.txt ") for row in rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path := write("a.parquet", ""))
    in_parquet = list(read_multiple_choice(path))
    assert [(row.choices, row.answer) for row in in_parquet] == [
        (row.choices, row.answer) for row in rows
    ]
    with pytest.raises(DataError, match="nor a dialogue of DREAM; write records with article, que"):
        list(read_multiple_choice(write("swag.jsonl", '{"sent1": "a", "ending0": "b"}')))
    del records[0]["answer"]
    with pytest.raises(DataError, match=r"train.jsonl: record 1: .*answers"):
        list(read_multiple_choice(write("train.jsonl", json.dumps(records[:1]))))


def test_a_question_keeps_the_id_of_its_record(write: Callable[[str, str], str]) -> None:
    """Also with an id that several questions have, such as the passage's."""
    asked = {"article": "a", "question": "q?", "options": ["x", "y"], "answer": "A"}
    records = [{"id": name, **asked} for name in ("first", 7, 7)]
    rows = list(read_multiple_choice(write("a.jsonl", "\n".join(map(json.dumps, records)))))
    assert [row.id.partition(" ")[0] for row in rows] == ["first", "7", "7"]


def test_a_choice_stands_in_the_blank_of_its_question(write: Callable[[str, str], str]) -> None:
    """As ALBERT's race_utils.py has it; without a blank, behind the question."""
    record = RACE | {"questions": ["She sold it to _ .", "Who sold it?"]}
    blank, asked = read_multiple_choice(write("a.json", json.dumps(record)))
    assert blank.texts_with("Bob") == [RACE["article"], "She sold it to Bob ."]
    assert asked.texts_with("Bob") == [RACE["article"], "Who sold it? Bob"]


def test_dream(tmp_path: Path) -> None:
    path = tmp_path / "dev.json.gz"
    path.write_bytes(gzip.compress(json.dumps(DREAM, indent=1).encode()))
    (question,) = read_multiple_choice(str(path))
    where = f"{path}: record 1: id 4, question 1"
    passage = "M: Tea?\nW: No."
    assert question == ChoiceQuestion(where, "4-0", passage, "Tea?", ("yes", "no"), 1, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.json: is empty"),
        ("[]", "a.json: holds no questions"),
        ("[3]", "record 1: is neither a record of RACE nor a dialogue of DREAM"),
        (
            json.dumps(RACE | {"answers": ["B", "D"]}),
            "question 2: the answer 'D' is none of A, B, C",
        ),
        (json.dumps(RACE | {"answers": ["B"]}), "record 1: there must be equally many questions"),
        (
            json.dumps(RACE | {"options": [["Bob"], ["x", "y"]], "answers": ["A", "A"]}),
            "two choices",
        ),
        (
            json.dumps(RACE | {"options": [["Bob", 3], []]}),
            "question 1: options: must be a list of",
        ),
        (
            json.dumps(DREAM).replace('"answer": "no"', '"answer": "No"'),
            "answer 'No' is none of yes",
        ),
        (
            json.dumps([DREAM[0][:2]]),
            "record 1: must be a list of turns, a list of questions and an",
        ),
        ("[\n[", "a.json:2: not valid JSON"),
    ],
)
def test_multiple_choice_that_cannot_be_read(
    text: str, message: str, write: Callable[[str, str], str]
) -> None:
    assert message in refusal(read_multiple_choice(write("a.json", text)))


def test_trec_text_may_stand_behind_the_number(write: Callable[[str, str], str]) -> None:
    text = "<DOC><DOCNO> a </DOCNO>\nThe wing &amp; <P>the slip</P>\n</DOC><DOC><DOCNO>b</DOCNO>"
    path = write("docs.trec", f"{text}<TEXT></TEXT></DOC>")
    found = [(one.id, one.text) for one in read_retrieval_documents(path)]
    assert found == [("a", "The wing & the slip"), ("b", "")]


def test_trec_documents_and_topics(write: Callable[[str, str], str]) -> None:
    path = write("docs.sgml", TREC)
    first, second = read_retrieval_documents(path)
    assert first == RetrievalText(
        f"{path}:1", "FT911-3", "Lift & drag\nLift at M < 3 & R > 2. Drag."
    )
    assert second == RetrievalText(f"{path}:10", "2", "wings")
    topics = write("topics.txt", TOPICS)
    assert [(query.id, query.text) for query in read_queries(topics)] == [
        ("301", "organized crime"),
        ("7", "slipstream wings"),
    ]
    assert [query.id for query in read_queries(topics, numbered_by_order=True)] == ["1", "2"]


def test_beir_tables(write: Callable[[str, str], str]) -> None:
    documents = write("corpus.jsonl", '{"_id": "d1", "title": "Lift", "text": "Wings."}\n')
    assert next(read_retrieval_documents(documents)).text == "Lift\nWings."
    queries = write("queries.tsv", "_id\ttext\nq1\twhat lifts?\n")
    assert next(read_queries(queries)) == RetrievalText(f"{queries}:2", "q1", "what lifts?")
    path = write("test.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t2\n")
    assert list(read_judgements(path)) == [Judgement(f"{path}:2", "q1", "d1", 2)]


def test_trec_judgements(write: Callable[[str, str], str]) -> None:
    path = write("qrels", "1 0 184 1\n\n1 0 29 -1\n")
    assert [one.relevance for one in read_judgements(path)] == [1, -1]
    assert "qrels:1: must be a query" in refusal(read_judgements(write("qrels", "1 0 184 yes!\n")))
    assert "qrels:1: must be a query" in refusal(read_judgements(write("qrels", "1 2\n")))
    assert "qrels: holds no judgements" in refusal(read_judgements(write("qrels", "")))


def test_a_collection_that_cannot_be_read(write: Callable[[str, str], str]) -> None:
    for text, message in (
        ("wings", "a.xml: has no <doc>, and is no table: .tsv, .csv, .jsonl"),
        ("\n<doc><text>x</text></doc>", "a.xml:2: <doc> has no <docno>"),
        (
            "<doc><docno>1</docno></doc>\n<doc><docno>1</docno></doc>",
            "a.xml:2: the id '1' comes twice",
        ),
    ):
        assert message in refusal(read_retrieval_documents(write("a.xml", text)))


def test_minimal_pairs_of_a_file_and_of_a_folder(
    write: Callable[[str, str], str], tmp_path: Path
) -> None:
    path = write("agreement_1.jsonl", json.dumps(PAIR) + "\n")
    (pair,) = read_minimal_pairs(path)
    assert (pair.good, pair.bad) == ("Who sings?", "Who sing?")
    assert (pair.paradigm, pair.phenomenon, pair.where) == ("agreement_1", "agreement", f"{path}:1")
    assert list(read_minimal_pairs(str(tmp_path))) == [pair]
    same = json.dumps(PAIR | {"sentence_bad": "Who sings?"})
    message = "b.jsonl:1: the good and the bad sentence are the same"
    assert message in refusal(read_minimal_pairs(write("b.jsonl", same)))
    (tmp_path / "hollow").mkdir()
    assert "holds no .jsonl files" in refusal(read_minimal_pairs(str(tmp_path / "hollow")))


def test_only_the_jsonl_files_of_a_folder_are_minimal_pairs(tmp_path: Path) -> None:
    text = json.dumps(PAIR) + "\n"
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.jsonl").write_text(text)
    (tmp_path / "b.jsonl.bak").write_text("{")
    (tmp_path / "._b.jsonl").write_bytes(b"\x00\x05\x16\x07")
    (tmp_path / ".trash").mkdir()
    (tmp_path / ".trash" / "c.jsonl").write_text("{")
    found = [pair.where for pair in read_minimal_pairs(str(tmp_path))]
    assert found == [f"{tmp_path}/b.jsonl:1", f"{tmp_path}/deeper/a.jsonl.gz:1"]


def refusal(read: Iterator[Any]) -> str:
    """The one line with which reading is refused."""
    with pytest.raises(DataError) as error:
        list(read)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_plain_tables_of_ids_and_texts(write: Callable[[str, str], str], tmp_path: Path) -> None:
    for name, text in {
        "a.jsonl": '{"id": "7", "text": "Wings."}\n',
        "a.csv": "id,text\n7,Wings.\n",
        "a.tsv": "text\tid\nWings.\t7\n",
    }.items():
        (document,) = read_retrieval_documents(write(name, text))
        assert (document.id, document.text) == ("7", "Wings.")
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"_id": ["7"], "title": ["On lift"], "text": ["Wings."]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert next(read_retrieval_documents(str(tmp_path / "a.parquet"))).text == "On lift\nWings."
    path = write("b.tsv", "id\tbody\n7\tWings.\n")
    assert "b.tsv: columns.text: no column 'text'" in refusal(read_retrieval_documents(path))
