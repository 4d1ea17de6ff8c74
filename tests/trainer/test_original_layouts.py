"""Files of tasks in their authors' layouts, read as the originals' readers read them.

Expected texts and labels follow ALBERT's classifier_utils.py and race_utils.py, BERT's run_squad.py
and the BERT baseline of DREAM's authors (nlpdata/mrc_bert_baseline).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import configs
from configs.errors import ConfigError
from data_pipeline import EncodedExample, TextEncoder
from tests.data_pipeline.test_task_collections import DREAM, RACE
from trainer.config import JobConfig
from trainer.job_data.examples import tasks_of
from trainer.objectives.task import TaskConfig

QUOTED = 'He said "yes , twice'  # quotes are text in all of these files
LONG = "sentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
Read = tuple[tuple[str, ...], Any]  # the texts of an example, and its label

TABLES: dict[str, tuple[str, str, list[Read]]] = {
    "cola": (
        "train.tsv",
        f"gj04\t1\t\t{QUOTED}\nbc01\t0\t*\tHe them saw.\n",
        [((QUOTED,), "1"), (("He them saw.",), "0")],
    ),
    "sst2": (
        "train.tsv",
        f"sentence\tlabel\n{QUOTED} \t0\na treat \t1\n",
        [((QUOTED,), "0"), (("a treat",), "1")],
    ),
    "mrpc": (
        "train.tsv",
        f"\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\t{QUOTED}\tHe agreed\n"
        "0\t9\t10\tIt rose\tIt fell\n",
        [((QUOTED, "He agreed"), "1"), (("It rose", "It fell"), "0")],
    ),
    "stsb": (
        "train.tsv",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        f"0\tmain\tMSRvid\t2012test\t0001\tnone\tnone\t{QUOTED}\tHe agreed\t4.250\n",
        [((QUOTED, "He agreed"), 4.25)],
    ),
    "qnli": (
        "train.tsv",
        f"index\tquestion\tsentence\tlabel\n0\tWho?\t{QUOTED}\tentailment\n"
        "1\tWhen?\tIt rose\tnot_entailment\n",
        [(("Who?", QUOTED), "entailment"), (("When?", "It rose"), "not_entailment")],
    ),
    "rte": (
        "train.tsv",
        f"index\tsentence1\tsentence2\tlabel\n0\t{QUOTED}\tHe agreed\tentailment\n"
        "1\tIt rose\tIt fell\tnot_entailment\n",
        [((QUOTED, "He agreed"), "entailment"), (("It rose", "It fell"), "not_entailment")],
    ),
    "mnli": (
        "train.tsv",
        f"index\tpromptID\tpairID\tgenre\t{LONG}\tsentence1\tsentence2\tlabel1\tgold_label\n"
        f"0\t1\t1e\tfiction\t( a\t( b\t(A\t(B\t{QUOTED}\tHe agreed\tneutral\tentailment\n"
        "1\t1\t1n\tfiction\t( a\t( b\t(A\t(B\tIt rose\tIt fell\tneutral\tneutral\n",
        [((QUOTED, "He agreed"), "entailment"), (("It rose", "It fell"), "neutral")],
    ),
    "mnli, as its authors have it": (
        "multinli_1.0_train.jsonl",
        "".join(
            json.dumps({"annotator_labels": ["x"], "genre": "fiction", "gold_label": label,
                        "sentence1": first, "sentence2": "He agreed", "promptID": "1"}) + "\n"
            for first, label in [(QUOTED, "entailment"), ("It rose", "-"), ("It fell", "neutral")]
        ),
        [((QUOTED, "He agreed"), "entailment"), (("It fell", "He agreed"), "neutral")],
    ),
    "qqp": (
        "train.tsv",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
        f"1\t2\t3\t{QUOTED}\tDid he?\t1\n2\t4\t5\tHow are\nyou?\tHow are you?\t1\n"
        "3\t6\t7\tWho?\tWhen?\t0\n",
        [((QUOTED, "Did he?"), "1"), (("Who?", "When?"), "0")],
    ),
    "wikiqa": (
        "WikiQASent-train.txt",
        f"Who ?\t{QUOTED}\t0\nWho ?\tHe agreed .\t1\n",
        [(("Who ?", QUOTED), "0"), (("Who ?", "He agreed ."), "1")],
    ),
}  # fmt: skip


def encoded(
    name: str, file: Path, corpus: Path
) -> tuple[TaskConfig, TextEncoder, list[EncodedExample]]:
    """A shipped task, and the examples that it makes of a training file."""
    words = ["teacher.model=bert_tiny", "teacher.init.pretrained=x", f"data.train={file}"]
    (one,) = tasks_of(configs.load(name, JobConfig, "task", words))
    encoder = TextEncoder(corpus / "tokenizer", 64)
    task = one.task.with_labels_of(one.file("train"))
    return task, encoder, [*task.encode(one.file("train"), encoder)]


def ids(encoder: TextEncoder, *texts: str) -> list[list[int]]:
    return [encoder.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def as_lists(example: EncodedExample) -> Iterator[list[list[int]]]:
    """The segments of each sequence."""
    for sequence in example.sequences:
        yield [[*map(int, segment)] for segment in sequence]


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_texts(name: str, corpus: Path, tmp_path: Path) -> None:
    file, text, right = TABLES[name]
    (tmp_path / file).write_text(text)
    task, encoder, examples = encoded(name.partition(",")[0], tmp_path / file, corpus)
    labels = task.labels
    assert len(examples) == len(right)
    for example, (texts, label) in zip(examples, right, strict=True):
        assert [*as_lists(example)] == [ids(encoder, *texts)]
        value = example.targets[task.head]
        assert (labels[value] if labels else value) == label


def test_rows_with_an_ignored_label_are_counted(corpus: Path, tmp_path: Path, caplog) -> None:
    file, text, _ = TABLES["mnli, as its authors have it"]
    (tmp_path / file).write_text(text)
    encoded("mnli", tmp_path / file, corpus)
    (said,) = caplog.messages
    assert said == (
        f"{tmp_path / file}: leaves out 1 row with an ignored label; {tmp_path / file}:2: -"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{target: number, ignored_labels: [x]}", "target: number has no such labels"),
        ("{labels: [a, b], ignored_labels: [b]}", "b is one of the labels; remove it here or"),
    ],
)
def test_ignored_labels_that_mean_nothing_are_refused(settings: str, message: str) -> None:
    words = ["teacher.model=bert_tiny", "teacher.init.pretrained=x", "data.train=a.tsv"]
    with pytest.raises(ConfigError, match=f"sentence_pair.ignored_labels: {message}"):
        configs.load(
            "sentence_pair", JobConfig, "task",
            [*words, f"teacher.objective.sentence_pair={settings}"],
        )  # fmt: skip


def test_conll(corpus: Path, tmp_path: Path) -> None:
    """Its tags are IOB1, and -DOCSTART- is no sentence; the first piece of a word has its tag."""
    rows = "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nof IN I-PP O\nParis NNP I-NP I-LOC\n"
    (tmp_path / "eng.train").write_text(rows)
    task, encoder, (example,) = encoded("conll", tmp_path / "eng.train", corpus)
    words = ids(encoder, "EU", "of", "Paris")
    assert [*as_lists(example)] == [[[*chain(*words)]]]
    tags = example.targets[task.head]
    assert isinstance(tags, np.ndarray)
    first = np.cumsum([0, *map(len, words[:-1])])
    assert [task.labels[tags[at]] for at in first] == ["I-ORG", "O", "I-LOC"]


def test_squad(corpus: Path, tmp_path: Path) -> None:
    passage = "It was found  by Ann, of that class."
    answer = {"text": "Ann", "answer_start": passage.index("Ann")}
    asked = {"id": "1", "question": "Who found it?", "answers": [answer]}
    paragraphs = [{"context": passage, "qas": [asked]}]
    document = {"version": "1.1", "data": [{"title": "T", "paragraphs": paragraphs}]}
    (tmp_path / "train.json").write_text(json.dumps(document))
    task, encoder, (example,) = encoded("squad", tmp_path / "train.json", corpus)
    assert [*as_lists(example)] == [ids(encoder, "Who found it?", passage)]
    question, before, name = ids(encoder, "Who found it?", "It was found  by", "Ann")
    begin = 1 + len(question) + 1 + len(before)
    assert example.targets[task.head] == begin
    assert example.targets[f"{task.head}_last"] == begin + len(name) - 1


def test_race(corpus: Path, tmp_path: Path) -> None:
    """The passage, and the question with each option in its blank or behind it."""
    asked = {"questions": ["_ sold it.", "Who sold it?"], "options": [["Bob", "Ann"]] * 2}
    for level, name in (("high", "high1.txt"), ("middle", "middle2.txt")):
        (tmp_path / level).mkdir()
        (tmp_path / level / name[-5:]).write_text(json.dumps(RACE | asked | {"id": name}))
    _, encoder, examples = encoded("race", tmp_path, corpus)
    passage = RACE["article"]
    assert [[*as_lists(example)] for example in examples[:2]] == [
        [ids(encoder, passage, f"{name} sold it.") for name in ("Bob", "Ann")],
        [ids(encoder, passage, f"Who sold it? {name}") for name in ("Bob", "Ann")],
    ]
    assert len(examples) == 4


def test_dream(corpus: Path, tmp_path: Path) -> None:
    """The dialogue, the question and the choice, each closed by a separator of its own."""
    (tmp_path / "train.json").write_text(json.dumps(DREAM))
    task, encoder, (example,) = encoded("dream", tmp_path / "train.json", corpus)
    dialogue, question, yes, no = ids(encoder, "M: Tea?\nW: No.", "Tea?", "yes", "no")
    sep = encoder.vocabulary.sep
    assert [*as_lists(example)] == [[dialogue, [*question, sep, *said]] for said in (yes, no)]
    assert example.targets[task.head] == 1


def test_the_longest_of_dialogue_question_and_choice_is_cut_first(corpus: Path) -> None:
    encoder = TextEncoder(corpus / "tokenizer", 24)  # 20 tokens of text, with 4 special ones
    texts = ["the " * 30, "of " * 9, "and " * 3]
    first, second = encoder.sequence(texts, "here")
    assert (len(first), second.tolist().index(encoder.vocabulary.sep), len(second)) == (9, 8, 12)
    assert encoder.cut == {"here"}
