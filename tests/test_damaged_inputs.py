"""Damage to what commands read besides corpora and runs: models, tables, texts, suites and so on.

These files are the user's, and few have a checksum: a command that reads a damaged one ends well,
or with one line that names it; nothing is left of what it was about to write.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data_pipeline.tokenization.tokenizer import load
from model import CLASSIFICATION, TaskHeadConfig, build, save_pretrained, with_task_head
from tests.damage import Damage, damages, edits
from tests.fork_server import REPOSITORY
from tests.forked_commands import Case, Ended, run
from tests.test_damaged_files import A_RANK, contents
from tests.trainer import tiny
from trainer.task_facts import TaskFacts, write_facts

OF_EACH_FILE = 10
WORDS = ["the", "of", "and", "to", "in", "that"]
TEXTS = [f"{one} {other} {one}." for one in WORDS for other in WORDS]
TUNED = (
    "--model {in}/model output_dir={out} steps=2 epochs=null log.wandb=disabled "
    "batch={{size: 4, micro_batch: 4}} data.sequence_length=16"
)
ONE_FILE = "data.train={file} data.validation={file}"
COPIES = (
    "single_sentence teacher.init.pretrained={in}/model data.train={in}/moods.tsv "
    "data.validation={in}/moods.tsv --out {out}/more.tsv"
)
PREDICT = "predict {in}/model {file} --out {out}/answers.jsonl"
ANALYZE = "analyze {in}/masked {in}/text.txt --out {out}/analysis --examples 2 --length 8"
SUITE = "evaluate {in}/masked --suite {in}/suite.yaml --out {out}/suite data.root={in}"
RETRIEVAL = (
    f"finetune retrieval {TUNED} data.train={{in}}/qrels.txt "
    "data.files.documents={in}/documents.jsonl data.files.queries={in}/queries.tsv"
)
# The commands that read a file; {in} is the folder of all files, {out} an empty one.
COMMANDS = {
    "model/*": [
        "predict {in}/model {in}/moods.tsv --out {out}/answers.jsonl",
        "embed {in}/model the --json",
        "import {in}/model --out {out}/imported",
        "analyze {in}/model single_sentence data.train={in}/moods.tsv --out {out}/analysis "
        "data.validation={in}/moods.tsv --examples 2",
        f"data perturb {COPIES} --replace 0",
        "tokenizer compare {in}/text.txt {in}/model",
        "data build {in}/text.txt --tokenizer {in}/model --out {out}/corpus",
        f"finetune single_sentence {TUNED} data.train={{in}}/moods.tsv",
    ],
    "masked/*": [f"data augment {COPIES} --model {{in}}/masked", ANALYZE, SUITE],
    "moods.*": [PREDICT, f"finetune single_sentence {TUNED} data.train={{file}}"],
    "words.*": [f"finetune tagging {TUNED} {ONE_FILE}"],
    "words.txt": [f"data perturb {COPIES} --tagged {{file}}"],
    "span.*": [f"finetune span {TUNED} {ONE_FILE}"],
    "choices.json": [f"finetune multiple_choice {TUNED} {ONE_FILE}"],
    "documents.jsonl": [RETRIEVAL],
    "queries.tsv": [RETRIEVAL],
    "qrels.txt": [RETRIEVAL],
    "text.*": [
        "tokenizer train {file} --kind wordpiece --vocab-size 60 --out {out}/tokenizer",
        "tokenizer compare {file} {in}/model",
        "data build {file} --tokenizer {in}/model --out {out}/corpus",
        ANALYZE.replace("{in}/text.txt", "{file}"),
    ],
    "text.txt": [PREDICT],
    "vectors.txt": ["embed {in}/model the --vectors {file} --json"],
    "parsed.conllu": [f"{ANALYZE} --parsed {{file}}"],
    "pairs.jsonl": [SUITE],
    "suite.yaml": [SUITE],
    "task.yaml": [f"finetune {{file}} {TUNED} data.train={{in}}/moods.tsv"],
}


@dataclass(frozen=True)
class Trial:
    """A command that was given a damaged file, and how it ended."""

    file: str
    damage: str
    command: str
    ended: Ended
    left: tuple[str, ...]  # of what a failed command wrote, in its empty folder

    def __str__(self) -> str:
        said = (self.ended.errors or self.ended.output)[-300:]
        words = self.command[:60]
        return f"{self.file}, {self.damage}: {words}: {self.ended.code} {said!r} {self.left}"

    @property
    def is_named(self) -> bool:
        """Whether it ended well, or its message names the file or the model's folder."""
        names = Path(self.file).parts
        return not self.ended.code or any(name in self.ended.errors for name in names)


def record(text: str, number: int) -> dict[str, object]:
    return {"text": text, "label": ["bad", "good"][number % 2]}


@pytest.fixture(scope="module")
def inputs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small file of each kind."""
    folder = tmp_path_factory.mktemp("inputs")
    size = load(corpus / "tokenizer")[1].vocab_size
    shape = {"vocab_size": size, "max_positions": 32, "layers": 1}
    masked = tiny.encoder(**shape)
    head = TaskHeadConfig(CLASSIFICATION, ["bad", "good"])
    tuned = with_task_head(tiny.encoder(**shape, mlm_head=False), "single_sentence", head)
    for name, config in (("masked", masked), ("model", tuned)):
        save_pretrained(build(config, seed=1), folder / name, tokenizer=corpus / "tokenizer")
    facts = TaskFacts(("text",), {}, 16, {"task": "single_sentence"})
    write_facts(folder / "model", {"single_sentence": facts})
    rows = [record(text, number) for number, text in enumerate(TEXTS)]
    lines = [json.dumps(row) for row in rows]
    answers = {"text": ["of"], "answer_start": [4]}
    context = {"context": "the of and", "question": "to in?"}
    paragraph = {
        "context": "the of and",
        "qas": [{"id": "a", "question": "to?", "answers": [{"text": "of", "answer_start": 4}]}],
    }
    choice = {
        "article": "the of",
        "questions": ["and?"],
        "options": [["to", "in"]],
        "answers": ["A"],
        "id": "a",
    }
    tags = {"tokens": ["the", "of"], "tags": ["B-A", "O"]}
    table = "".join(f"{row['text']}\t{row['label']}\n" for row in rows)
    words = "".join(f"{one}\tB-A\n{two}\tO\n\n" for one in WORDS for two in WORDS)
    pair = {
        "sentence_good": "the of",
        "sentence_bad": "of the",
        "UID": "a",
        "linguistics_term": "b",
    }
    parsed = "1\tthe\tthe\tDET\t_\t_\t2\tdet\t_\t_\n2\tof\tof\tNOUN\t_\t_\t0\troot\t_\t_\n\n"
    files = {
        "moods.tsv": f"text\tlabel\n{table}",
        "moods.csv": "text,label\n" + table.replace("\t", ","),
        "moods.jsonl": "\n".join(lines),
        "moods.json": f"[{','.join(lines)}]",
        "words.txt": words,
        "words.jsonl": "\n".join([json.dumps(tags)] * 9),
        "span.json": json.dumps({"data": [{"title": "t", "paragraphs": [paragraph]}]}),
        "span.jsonl": "\n".join(
            json.dumps({"id": str(n), **context, "answers": answers}) for n in range(8)
        ),
        "choices.json": json.dumps([{**choice, "id": str(n)} for n in range(8)]),
        "documents.jsonl": "\n".join(
            json.dumps({"_id": f"d{n}", "title": "", "text": text}) for n, text in enumerate(TEXTS)
        ),
        "queries.tsv": "_id\ttext\n" + "".join(f"q{n}\t{text}\n" for n, text in enumerate(TEXTS)),
        "qrels.txt": "".join(f"q{n} 0 d{n} 1\n" for n in range(len(TEXTS))),
        "text.txt": "\n\n".join("\n".join(TEXTS) for _ in range(9)),
        "text.jsonl": "\n".join(lines),
        "text.csv": "text,label\n" + table.replace("\t", ","),
        "vectors.txt": "".join(f"{word} 0.5 {n} 1\n" for n, word in enumerate(WORDS)),
        "parsed.conllu": parsed * 6,
        "pairs.jsonl": "\n".join([json.dumps(pair)] * 3),
        "suite.yaml": "about: Pairs.\nminimal_pairs: {pairs: pairs.jsonl}\n",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    shutil.copy(REPOSITORY / "configs/task/single_sentence.yaml", folder / "task.yaml")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "moods.parquet")
    return folder


def trial(folder: Path, place: Path, file: Path, command: str, damage: Damage | None) -> Trial:
    """Run a command on a copy of the folder in which this file is damaged."""
    shutil.rmtree(place, ignore_errors=True)
    copy, out = place / "in", place / "out"
    shutil.copytree(folder, copy)
    out.mkdir()
    if damage is not None:
        damage.inflict(copy / file)
    before = contents(copy)
    names = {"in": copy, "out": out, "file": copy / file}
    argv = [word.format(**names) for word in words_of(command)]
    ended = run(Case(argv, A_RANK if argv[0] == "finetune" else {}))
    assert before == contents(copy), (file, command)
    written = [path for path in out.rglob("*") if path.is_file()]
    left = [path for path in written if path.name.startswith(".") or path.suffix == ".part"]
    if ended.code and argv[0] != "finetune":
        left += [path for path in written if path.name in ("answers.jsonl", "more.tsv")]
    shown = tuple(sorted(str(path.relative_to(out)) for path in left))
    return Trial(str(file), damage.name if damage else "whole", command, ended, shown)


def words_of(command: str) -> Iterator[str]:
    """The words of a command; a value in braces is one."""
    words = command.split()
    while words:
        word = words.pop(0)
        while word.count("{") != word.count("}"):
            word += f" {words.pop(0)}"
        yield word


def cases(folder: Path, pattern: str) -> Iterator[tuple[Path, str, Damage]]:
    """A sample of the damages to each file, JSON's edits among them, with its commands in turn."""
    commands = COMMANDS[pattern]
    for path in sorted(folder.glob(pattern)):
        data = path.read_bytes()
        harms = [*damages(data, flips=4)]
        changed = [*edits(data)] if path.suffix == ".json" else []
        harms += random.Random(1).sample(changed, min(len(changed), len(harms)))
        random.Random(len(data)).shuffle(harms)
        size = OF_EACH_FILE * (2 if changed else 1)
        for number, damage in enumerate(harms[:size]):
            yield path.relative_to(folder), commands[number % len(commands)], damage


@pytest.mark.slow
@pytest.mark.parametrize("pattern", COMMANDS)
def test_a_damaged_input_is_named_or_used(pattern: str, inputs: Path, tmp_path: Path) -> None:
    place = tmp_path / "trial"
    first = min(inputs.glob(pattern)).relative_to(inputs)
    for command in COMMANDS[pattern]:
        intact = trial(inputs, place, first, command, None)
        assert (intact.ended.code, intact.left) == (0, ()), str(intact)
    tried = [trial(inputs, place, *case) for case in cases(inputs, pattern)]
    assert [f"{one.ended.fault}: {one}" for one in tried if one.ended.fault] == []
    assert [str(one) for one in tried if one.left] == []
    assert [str(one) for one in tried if not one.is_named] == []
