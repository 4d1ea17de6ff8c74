"""Every layout of task files gives the same examples; unreadable files are one clear line."""

from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_pipeline import DataError
from data_pipeline.task_files.conll import read_conll, read_tagged_records
from data_pipeline.task_files.contents import present
from data_pipeline.task_files.questions import AnswerSpan, read_squad
from data_pipeline.task_files.tables import as_number, class_names, list_in, read_table

REVIEWS = [
    ("it 's a charming journey .", "1"),
    ('He said "no" , and left', "0"),
    ("naïve, “quoted”; 日本", "1"),
]
COLUMNS = {"text": "review", "label": "stars"}
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": "The bank lies on the river. It is old.",
                    "qas": [
                        {
                            "id": "a1",
                            "question": "Where is it?",
                            "answers": [
                                {"text": "on the river", "answer_start": 14},
                                {"text": "the river", "answer_start": 17},
                            ],
                        },
                        {"id": "a2", "question": "Whose?", "answers": [], "is_impossible": True},
                    ],
                }
            ]
        }
    ]
}
CONLL = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

Peter\tNNP\tI-NP\tI-PER
"""


def tables() -> Iterator[tuple[str, bytes]]:
    lines = [f"{text}\t7\t{label}" for text, label in REVIEWS]
    yield "a.tsv", "\n".join(["\ufeffreview\tid\tstars", *lines]).encode()
    quoted = io.StringIO()
    csv.writer(quoted).writerows([("id", "stars", "review"), *((7, y, x) for x, y in REVIEWS)])
    yield "b.csv", quoted.getvalue().encode()
    records = [{"review": text, "stars": int(label)} for text, label in REVIEWS]
    yield "c.jsonl", "\n\n".join(json.dumps(record) for record in records).encode()
    packed = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), packed, row_group_size=2)
    yield "d.parquet", packed.getvalue()


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize(("name", "contents"), [*tables()], ids=lambda value: str(value)[:9])
def test_layouts_and_compressions_hold_the_same_rows(
    name: str, contents: bytes, packing: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{name}{packing}"
    path.write_bytes(PACKERS[packing](contents))
    rows = [row.values for row in present(read_table(str(path), COLUMNS))]
    assert rows == [{"text": text, "label": label} for text, label in REVIEWS]


def test_a_whole_number_has_one_form(tmp_path: Path) -> None:
    (path := tmp_path / "a.json").write_text('[{"t": 1.0}, {"t": 1}, {"t": 2.50}, {"t": 1e300}]')
    rows = [row["text"] for _, row in read_table(str(path), {"text": "t"})]
    assert rows == ["1", "1", "2.5", "1e+300"]


def test_null_is_an_empty_cell(tmp_path: Path) -> None:
    """It was refused, where CSV has an empty cell in its place."""
    records = [{"review": "x", "stars": 1}, {"review": "y", "stars": None}]
    (lines := tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    packed = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), packed)
    for path in (lines, packed):
        first, second = read_table(str(path), COLUMNS)
        assert (first.values["label"], second.values) == ("1", {"text": "y", "label": ""})


def test_a_row_has_its_line_number(tmp_path: Path) -> None:
    for name, text, places in (
        ("a.tsv", "t\nx\n\ny\n", [":2", ":4"]),
        ("a.csv", 't\n"two\nlines"\ny\n', [":2", ":4"]),
        ("a.jsonl", '{"t": "x"}\n{"t": "y"}\n', [":1", ":2"]),
    ):
        path = tmp_path / name
        path.write_text(text)
        rows = present(read_table(str(path), {"text": "t"}))
        assert [row.where for row in rows] == [f"{path}{place}" for place in places]


def test_a_field_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    long = "a" * 200_000
    (path := tmp_path / "a.csv").write_text(f"t\n{long}\n")
    assert [values for _, values in read_table(str(path), {"text": "t"})] == [{"text": long}]


def test_columns_by_number_need_no_header(tmp_path: Path) -> None:
    path = tmp_path / "cola.tsv"
    path.write_text('gj04\t1\t\tThe "sailors rode.\nclc95\t0\t*\tIf Sam, who.\textra\n')
    rows = [values for _, values in read_table(str(path), {"text": 4, "label": 2})]
    assert rows == [
        {"text": 'The "sailors rode.', "label": "1"},
        {"text": "If Sam, who.", "label": "0"},
    ]


@pytest.mark.parametrize(
    ("name", "contents", "columns", "message"),
    [
        ("a.tsv", "", COLUMNS, "a.tsv: holds no rows"),
        ("a.tsv", "review\tstars\n", COLUMNS, "a.tsv: holds no rows"),
        ("a.jsonl", "\n", COLUMNS, "a.jsonl: holds no rows"),
        (
            "a.tsv",
            "id\treviews\tstars\nx\ty\tz\n",
            COLUMNS,
            "columns.text: no column 'review'; did you mean reviews? There are: id, reviews, stars",
        ),
        ("a.csv", "a,b\n", COLUMNS, "columns.text: no column 'review'; there are: a, b"),
        (
            "a.csv",
            "review;stars\n",
            COLUMNS,
            "'review'; ';' does not separate columns here: commas",
        ),
        (
            "a.tsv",
            "review,stars\n",
            COLUMNS,
            "',' does not separate columns here: commas do in .csv",
        ),
        ("a.csv", "stars,stars\n1,2\n", {"label": "stars"}, "there are several columns 'stars'"),
        ("a.tsv", "review\tstars\nfine\n", COLUMNS, "a.tsv:2: has 1 column, where the header"),
        ("a.csv", "review,stars\nno, no,0\n", COLUMNS, "a.csv:2: has 3 columns, where the header"),
        ("a.tsv", "x\ty\nx\n", {"text": 2}, "a.tsv:2: has 1 column, where columns go up to 2"),
        ("a.tsv", "review\tstars\nfine\n", COLUMNS, "its columns are separated by tabs"),
        ("a.tsv", "x\ty\n", {"text": 0, "label": 2}, "text: columns are numbered from 1"),
        ("a.csv", 'review,stars\n"open,1\nx,2\n', COLUMNS, "a.csv:2: not valid CSV"),
        ("a.tsv", b"review\tstars\nna\xefve\t1\n", COLUMNS, "a.tsv:2: is not UTF-8; convert it"),
        ("a.jsonl", '{"review": "x", "stars": 1}\n{"re\n', COLUMNS, "a.jsonl:2: not valid JSON"),
        (
            "a.jsonl",
            f'\n{{"stars": {"1" * 5000}}}',
            COLUMNS,
            "a.jsonl:2: not usable JSON",
        ),
        (
            "a.jsonl",
            '{"review": "x", "stars": NaN}',
            COLUMNS,
            "a.jsonl:1: label: is nan; it must be text or a number",
        ),
        ("a.jsonl", '{"review": "x", "stars": -Infinity}', COLUMNS, "label: is -inf; it must"),
        (
            "a.jsonl",
            '{"review": "x", "stars": 1, "stars": 2}',
            COLUMNS,
            "a.jsonl:1: not usable JSON: the key 'stars' comes twice",
        ),
        ("a.jsonl", "[1]\n", COLUMNS, "a.jsonl:1: must be a JSON object"),
        ("a.jsonl", '{"text": "x"}\n', COLUMNS, "a.jsonl:1: columns.text: no column 'review'"),
        (
            "a.jsonl",
            '{"review": "x", "stars": 1}\n{"review": "x", "stars": "1"}\n',
            COLUMNS,
            "a.jsonl:2: label: is text, but a number at",
        ),
        ("a.jsonl", '{"review": "x"}', {"text": 1}, "give their names, which this file has"),
        ("a.tsv", "x\ty\n", {"text": 1, "label": "stars"}, "give the names of all of them, or"),
        ("a.arrow", "x", COLUMNS, ".json, .parquet; `to_parquet` of `datasets` writes one"),
        ("a.xls", "x", COLUMNS, "a.xls: the name of a table must end in .tsv"),
        ("a.parquet", "x", COLUMNS, "a.parquet: not a readable Parquet file"),
        ("a.tsv.gz", b"\x1f\x8b\x08rest", COLUMNS, "a.tsv.gz: cannot be decompressed"),
    ],
)
def test_a_table_that_cannot_be_read_as_asked(
    name: str, contents: str | bytes, columns: dict[str, str | int], message: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    with pytest.raises(DataError) as error:
        list(read_table(str(path), columns))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_lone_surrogates_become_question_marks(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"review": "a \ud83d cut, \ud83d\ude00", "stars": 2.50}')
    assert next(read_table(str(path), COLUMNS))[1] == {"text": "a ? cut, 😀", "label": "2.5"}
    # An answer keeps its place.
    path = tmp_path / "squad.json"
    path.write_text(spoilt(lambda p: p.update(context="\ud83d" * 14 + "on the river")))
    assert next(read_squad(str(path))).context.startswith("??")


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    for name in ("a.tsv", "a.parquet", "a.csv.xz"):
        with pytest.raises(DataError, match=f"{name}: cannot be read: No such file"):
            list(read_table(str(tmp_path / name), COLUMNS))


def test_a_number_where_a_number_is_wanted() -> None:
    assert as_number("a.tsv:2", "score", "4.750") == 4.75
    with pytest.raises(DataError, match=r"a\.tsv:2: score: 1e39 is too large"):
        as_number("a.tsv:2", "score", "1e39")
    for text in ("high", "", "nan", "inf"):
        with pytest.raises(DataError, match=f"a.tsv:2: score: '{text}' is not a number"):
            as_number("a.tsv:2", "score", text)


def test_squad_questions_with_and_without_answers(tmp_path: Path) -> None:
    path = tmp_path / "squad.json.xz"
    path.write_bytes(lzma.compress(json.dumps(SQUAD).encode()))
    answered, unanswerable = read_squad(str(path))
    assert answered.answers == (AnswerSpan("on the river", 14), AnswerSpan("the river", 17))
    assert answered.context[answered.answers[0].start : answered.answers[0].end] == "on the river"
    assert (unanswerable.id, unanswerable.answers) == ("a2", ())
    assert answered.where == f"{path}: id a1"
    assert [question.answers for question in read_squad(str(path), labelled=False)] == [(), ()]


def test_squad_whose_ids_are_whole_numbers(tmp_path: Path) -> None:
    path = tmp_path / "squad.json"
    path.write_text(spoilt(lambda p: [row.update(id=n) for n, row in enumerate(p["qas"])]))
    assert [question.id for question in read_squad(str(path))] == ["0", "1"]


def spoilt(change: Callable[[dict[str, Any]], object]) -> str:
    """SQUAD with a change to its paragraph."""
    document = json.loads(json.dumps(SQUAD))
    change(document["data"][0]["paragraphs"][0])
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "squad.json: is empty"),
        ('{"data":\n[}', "squad.json:2: not valid JSON"),
        ("{}", "squad.json: data: is missing"),
        ('{"data": []}', "squad.json: holds no questions"),
        (spoilt(lambda p: p["qas"][0].pop("id")), "squad.json: id: is missing"),
        (spoilt(lambda p: p["qas"][0].update(question=3)), "id a1: question: must be text"),
        (spoilt(lambda p: p["qas"][1].update(id="a1")), "id a1: this id comes twice"),
        (
            spoilt(lambda p: p["qas"][1].update(is_impossible="false")),
            "id a2: is_impossible: must be true or false, not 'false'",
        ),
        (
            spoilt(lambda p: p["qas"][0]["answers"][0].update(text="")),
            "id a1: an answer is empty",
        ),
        (
            spoilt(lambda p: p["qas"][1].pop("is_impossible")),
            "id a2: has no answers; if the passage has none, set is_impossible: true",
        ),
    ],
)
def test_squad_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "squad.json"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        list(read_squad(str(path)))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (15, "id a1: the answer 'on the river' is not at character 15: 'n the river.' is there"),
        (400, "is not at character 400: its passage has 38 characters"),
        (-3, "is not at character -3"),
    ],
)
def test_an_answer_that_is_not_where_it_says(start: int, message: str, tmp_path: Path) -> None:
    (path := tmp_path / "squad.json").write_text(
        spoilt(lambda p: p["qas"][0]["answers"][0].update(answer_start=start))
    )
    misplaced, right = read_squad(str(path))
    assert message in misplaced.misplaced
    assert right.misplaced == ""


FLAT = [
    {"id": "1", "title": "t", "context": "An aged kettle.", "question": "What?"}
    | {"answers": {"text": ["kettle"], "answer_start": [8]}},
    {"id": "2", "title": "t", "context": "An aged kettle.", "question": "Who?"}
    | {"answers": {"text": [], "answer_start": []}},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "data.json", "a.parquet"])
def test_squad_as_datasets_writes_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    lines = "".join(json.dumps(record) + "\n" for record in FLAT)
    document = {"data": FLAT} if name == "data.json" else FLAT
    path.write_text(lines if name == "a.jsonl" else json.dumps(document))
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(FLAT), path)
    answered, unanswerable = read_squad(str(path))
    assert answered.answers == (AnswerSpan("kettle", 8),)
    assert (unanswerable.id, unanswerable.answers) == ("2", ())


def test_conll_sentences(tmp_path: Path) -> None:
    path = tmp_path / "eng.train.gz"
    path.write_bytes(gzip.compress(CONLL.encode()))
    first, second = read_conll(str(path))
    assert (first.words, first.tags) == (("EU", "rejects"), ("I-ORG", "O"))
    assert (second.words, second.tags) == (("Peter",), ("I-PER",))
    assert (first.where, second.where) == (f"{path}:3", f"{path}:6")
    assert [sentence.tags for sentence in read_conll(str(path), tag=3)] == [
        ("I-NP", "I-VP"),
        ("I-NP",),
    ]
    assert all(sentence.tags == () for sentence in read_conll(str(path), tag=None))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# newpar\n# text = # 1 b\n1\t#\tNOUN\n2\tb\tX\n\n# text = c\n1\tc\tX\n", "#b c"),
        ("# text = a\n\n1 a X\n", "a"),  # also where it stands alone
        ("# sent_id = 1\n# text = b\n1 # O\n", "#"),
    ],
)
def test_comments_of_conll_u_are_left_out(text: str, words: str, tmp_path: Path) -> None:
    (path := tmp_path / "a.conllu").write_text(text)
    assert " ".join("".join(one.words) for one in read_conll(str(path), word=2)) == words


def test_lines_of_conll_u_that_hold_no_word_are_left_out(tmp_path: Path) -> None:
    numbers = ("1-2 don't _", "1 do AUX", "2 n't PART", "2.1 go _", "2.1-3.1 x _", "3 - PUNCT")
    lines = [one.split() for one in numbers if one != "2.1-3.1 x _"]
    rows = ["\t".join([number, word, word, tag, *"______"]) for number, word, tag in lines]
    (path := tmp_path / "a.conllu").write_text("\n".join(["# text = x", *rows, "", *rows[:2], ""]))
    first, second = read_conll(str(path), word=2, tag=4)
    assert (first.words, first.tags) == (("do", "n't", "-"), ("AUX", "PART", "PUNCT"))
    assert (first.where, second.words) == (f"{path}:3", ("do",))
    (path := tmp_path / "scores").write_text("2-3\tO\n4.1\tO\n")
    assert next(read_conll(str(path))).words == ("2-3", "4.1"), "words of another file"


@pytest.mark.parametrize("gap", ["\t", " "])
def test_the_word_that_is_a_number_sign_is_read(gap: str, tmp_path: Path) -> None:
    text = "# O\n1 O\n\n# B\n\na O\n# O\n".replace(" ", gap)
    (path := tmp_path / "ner.txt").write_text(text)
    assert [one.words for one in read_conll(str(path))] == [("#", "1"), ("#",), ("a", "#")]


def test_comments_of_germeval_are_left_out(tmp_path: Path) -> None:
    text = "#\thttp://a [2009-10-17]\n1\tAnna\tB-PER\tO\n2\t#\tO\tO\n\n#\tb\n1\tkam\tO\tO\n"
    (path := tmp_path / "a.tsv").write_text(text)
    sentences = [*read_conll(str(path), word=2, tag=3)]
    assert [one.words for one in sentences] == [("Anna", "#"), ("kam",)]
    assert [one.tags for one in sentences] == [("B-PER", "O"), ("O",)]


@pytest.mark.parametrize(
    ("rows", "tags"),
    [
        ("1 Anna B-PER O|2 ran O O", ("B-PER", "O")),  # GermEval: outer tags, then inner ones
        ("0 Anna O|1 ran B-X", ("O", "B-X")),
        ("1 Anna anna NOUN|2 ran run VERB", ("NOUN", "VERB")),
    ],
)
def test_words_behind_their_numbers_are_read(
    rows: str, tags: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The numbers were taken for the words, and GermEval's inner tags for all."""
    lines = rows.replace(" ", "\t").split("|")
    (path := tmp_path / "a.tsv").write_text("\n".join([lines[0], "", *lines, ""]))
    for _ in range(2):
        first, second = read_conll(str(path))
        assert (first.words, first.tags) == (("Anna",), tags[:1])
        assert (second.words, second.tags) == (("Anna", "ran"), tags)
    assert caplog.text.count("a.tsv: column 1 numbers the words: reads words from column 2") == 1
    assert next(read_conll(str(path), word=1, tag=2)).words == (lines[0][0],)
    first, _ = read_conll(str(path), tag=None)
    assert (first.words, first.tags) == (("Anna",), ())


def test_words_that_are_numbers_are_read(tmp_path: Path) -> None:
    (path := tmp_path / "a.txt").write_text("1\tO\n\n2\tO\n3\tO\n")
    assert [one.words for one in read_conll(str(path))] == [("1",), ("2", "3")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_tagged_records(name: str, tmp_path: Path) -> None:
    records = [{"tokens": ["Anna", "kam"], "ner_tags": ["B-PER", "O"]}]
    path = tmp_path / name
    path.write_text(json.dumps(records if name == "a.json" else records[0]))
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    (sentence,) = read_tagged_records(str(path))
    assert (sentence.words, sentence.tags) == (("Anna", "kam"), ("B-PER", "O"))
    with pytest.raises(DataError, match="pos: is missing"):
        list(read_tagged_records(str(path), tag="pos"))
    (path := tmp_path / "uneven.jsonl").write_text('{"words": ["a", "b"], "tags": [1]}')
    with pytest.raises(DataError, match="tags: must be a list with a tag for each word"):
        list(read_tagged_records(str(path)))


def test_a_byte_order_mark_alone_in_a_line_ends_a_sentence(tmp_path: Path) -> None:
    (path := tmp_path / "ner.txt").write_text("\ufeffEU B-ORG\n\ufeff\nPeter B-PER\n")
    assert [one.words for one in read_conll(str(path))] == [("EU",), ("Peter",)]


def test_conll_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "esp.train"
    path.write_bytes("España B-LOC\n".encode("latin-1"))
    assert next(read_conll(str(path), encoding="latin-1")).words == ("España",)
    with pytest.raises(DataError, match=r"esp.train:1: is not UTF-8"):
        next(read_conll(str(path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "ner.txt: holds no words"),
        ("-DOCSTART- O\n\n", "ner.txt: holds no words"),
        ("EU I-ORG\n\nrejects\n", "ner.txt:3: must have 2 columns or more"),
        ("EU B-ORG\nNew York B-LOC\n", "ner.txt:2: has 3 columns, where its sentence begins with"),
        ("EU\t\n", "ner.txt:1: must have 2 columns or more, none of them empty"),
    ],
)
def test_conll_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ner.txt"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        list(read_conll(str(path)))
    assert message in str(error.value)


@pytest.mark.parametrize("part", [b"x", datetime.date(2020, 1, 1), ["nested"]])
def test_a_list_of_anything_but_texts_and_numbers_is_refused(part, tmp_path: Path) -> None:
    """Its texts were to be JSON, which has no bytes and no dates."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"labels": [[part]]}), path)
    with pytest.raises(DataError, match=r"a.parquet: row 1: labels: is a \w+; it must be text or"):
        list(read_table(str(path), {"labels": "labels"}, lists=("labels",)))
    with pytest.raises(DataError, match=r"a:1: labels: .* is no list"):
        list_in("[" * 100_000, "a:1", "labels")


def test_the_names_that_datasets_notes_in_parquet(tmp_path: Path) -> None:
    """In `ClassLabel`s, also in lists (of which there are two forms) and in nested objects."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "tags": datasets.List(datasets.ClassLabel(names=["O", "B-X"])),
            "doc": {
                "kind": datasets.ClassLabel(names=["a", "b"]),
                "text": datasets.Value("string"),
            },
        }
    )
    rows = [{"label": 1, "tags": [0, 1], "doc": {"kind": 0, "text": "x"}}]
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list(rows, features=features).to_parquet(path)
    names = {"label": ["no", "yes"], "tags": ["O", "B-X"], "doc": [], "doc.kind": ["a", "b"]}
    assert class_names(str(path)) == names
    older = {"info": {"features": {"tags": [{"names": ["O"], "_type": "ClassLabel"}]}}}
    for note, expected in ((json.dumps(older), ["O"]), ("[]", []), ("{", [])):
        table = pyarrow.Table.from_pylist([{"tags": [0]}])
        noted = table.replace_schema_metadata({"huggingface": note})
        pyarrow.parquet.write_table(noted, path)
        assert class_names(str(path)) == {"tags": expected}
    assert class_names(str(tmp_path / "a.jsonl")) == {}
