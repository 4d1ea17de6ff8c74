"""Collections for retrieval, the runs of others about them, and the groups that are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from data_pipeline import DataError
from data_pipeline.task_files.collection import (
    Collection,
    TrainingGroup,
    read_ranking,
    training_groups,
)
from data_pipeline.task_files.retrieval import read_retrieval_documents

DOCUMENTS = "".join(f'{{"_id": "d{n}", "text": "about {n}"}}\n' for n in range(6))
QUERIES = '{"_id": "a", "text": "first?"}\n{"_id": "b", "text": "second?"}\n'


@pytest.fixture
def collection(tmp_path: Path) -> Collection:
    (tmp_path / "corpus.jsonl").write_text(DOCUMENTS + '{"_id": "empty", "text": ""}\n')
    (tmp_path / "queries.jsonl").write_text(QUERIES)
    return Collection.read(str(tmp_path / "corpus.jsonl"), str(tmp_path / "queries.jsonl"))


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize("first", ['"text": "x"', '"title": null, "text": "x"'])
def test_each_document_has_a_title_or_not(first: str, tmp_path: Path) -> None:
    """Titles were not read where the first record has none, and one without was refused."""
    rows = [first, '"title": "T", "text": "y"', '"text": "z"', '"title": "only", "text": null']
    lines = "".join(f'{{"_id": "d{number}", {row}}}\n' for number, row in enumerate(rows))
    texts = read_retrieval_documents(written(tmp_path, "corpus.jsonl", lines))
    assert [text.text for text in texts] == ["x", "T\ny", "z", "only"]


def test_runs_in_both_forms(tmp_path: Path) -> None:
    trec = written(tmp_path, "run.txt", "a Q0 d1 1 2.5 mine\n\na Q0 d2 2 -1 mine\n")
    ours = written(
        tmp_path,
        "run.jsonl",
        '{"query": "a", "documents": [{"id": "d1", "score": 2.5}, {"id": "d2", "score": -1}]}\n',
    )
    for path in (trec, ours):
        found = [(one.query, one.document, one.score) for one in read_ranking(path)]
        assert found == [("a", "d1", 2.5), ("a", "d2", -1.0)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run", "a d1 0.5\n", "run:1: must be a query, Q0, a document, a rank, a score and a tag"),
        ("run", "a Q0 d1 1 high x\n", "run:1: score: 'high' is not a number"),
        ("run", "\n", "run: holds no ranked documents"),
        ("run.jsonl", '{"id": "a", "vector": [1]}\n', 'run.jsonl:1: must be {"query": ...'),
        ("run.jsonl", "[\n", "run.jsonl:1: not valid JSON"),
    ],
)
def test_a_run_that_cannot_be_read(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        list(read_ranking(written(tmp_path, name, text)))
    assert message in str(error.value)


def test_judgements_and_runs_by_number(collection: Collection, tmp_path: Path) -> None:
    judged = written(tmp_path, "qrels", "a 0 d2 1\nb 0 d0 2\nb 0 d5 0\nb 0 d0 2\n")
    assert collection.relevance(judged) == {0: {2: 1}, 1: {0: 2, 5: 0}}
    run = written(tmp_path, "run", "b Q0 d4 1 3.5 x\n" * 2)
    assert collection.ranking(run) == {1: {4: 3.5}}
    assert collection.readable == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 0 d2 1\na 0 d9 1\n", "qrels:2: {folder}/corpus.jsonl has no document 'd9'"),
        ("c 0 d2 1\n", "qrels:1: {folder}/queries.jsonl has no query 'c'; where queries are"),
        ("a 0 d2 1\na 0 d2 0\n", "qrels:2: judges document 'd2' for query 'a' a second time"),
        ("a 0 d2 0\n", "qrels: judges no document relevant"),
    ],
)
def test_judgements_that_do_not_fit_are_refused(
    collection: Collection, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as error:
        collection.relevance(written(tmp_path, "qrels", text))
    assert message.format(folder=tmp_path) in str(error.value)


def test_a_run_about_an_unknown_document(collection: Collection, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run:1: .*corpus.jsonl has no document 'd7'"):
        collection.ranking(written(tmp_path, "run", "a Q0 d7 1 3.5 x\n"))


def test_a_second_score_of_a_document_is_refused(collection: Collection, tmp_path: Path) -> None:
    """The last one counted, which in a run that is sorted is the worst."""
    lines = '{"query": "b", "documents": [{"id": "d4", "score": 2}, {"id": "d4", "score": 1}]}\n'
    for name, text, line in (
        ("run", "b Q0 d4 1 3.5 x\na Q0 d4 1 2.5 x\nb Q0 d4 2 2.5 x\n", 3),
        ("run.jsonl", lines, 1),
    ):
        message = rf"{name}:{line}: ranks document 'd4' for query 'b' a second time, with another"
        with pytest.raises(DataError, match=message):
            collection.ranking(written(tmp_path, name, text))


@pytest.mark.parametrize(
    ("by_order", "said"),
    [
        (False, "where queries are counted 1, 2, 3, ... set numbered_by_order: true"),
        (True, "its queries are counted 1, 2, 3, ..."),
    ],
)
def test_an_unknown_query_is_told_by_which_ids_there_are(
    collection: Collection, by_order: bool, said: str, tmp_path: Path
) -> None:
    found = Collection.read(*collection.names, by_order)
    with pytest.raises(DataError) as error:
        found.ranking(written(tmp_path, "run", "c Q0 d1 1 2.5 x\n"))
    assert str(error.value).endswith(f"queries.jsonl has no query 'c'; {said}")


def test_negatives_are_those_listed_in_turn_then_others(collection: Collection) -> None:
    relevance = {0: {1: 1, 3: 2, 5: 0, 6: 1}}  # document 6 has no text
    listed = {0: {3: 9.0, 4: 1.0, 2: 5.0}}
    groups = list(training_groups(collection, relevance, listed, negatives=2))
    assert groups == [  # 5 was judged, 2 and 4 follow by score; 3 is relevant
        TrainingGroup(0, 1, (5, 2), (1, 3, 6)),
        TrainingGroup(0, 3, (4, 5), (1, 3, 6)),
    ]
    (one, other) = training_groups(collection, {0: {1: 1, 3: 1}}, {}, negatives=3)
    for group in (one, other):
        assert len({*group.negatives}) == 3
        assert {*group.negatives} <= {0, 2, 4, 5}
    assert list(training_groups(collection, {0: {1: 1, 3: 1}}, {}, 3)) == [one, other]
    with pytest.raises(DataError, match="has too few documents for negatives: 6"):
        list(training_groups(collection, {0: {1: 1}}, {}, negatives=6))


def test_the_documents_are_gone_through_once_for_all_groups(collection: Collection) -> None:
    class Counted(list[int]):
        passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return super().__iter__()

    vars(collection)["readable"] = readable = Counted(collection.readable)
    assert len([*training_groups(collection, {0: {1: 1, 3: 1, 5: 1}}, {}, 2)]) == 3
    assert readable.passes == 1
