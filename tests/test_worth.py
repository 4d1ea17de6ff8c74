"""The guide "What is my model worth", followed from `make demo` to predictions, in miniature.

The models are narrow, every run has two steps, and the files that the guide has its reader bring
are made up, in the layouts of the real ones.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, command_environment, tandem

PAGE = REPOSITORY / "docs" / "worth.md"
BLOCK = re.compile(r"^```(?:bash)?\n(.*?)^```", re.S | re.M)
SHORT = [
    "steps=2",
    "batch={size: 8, micro_batch: 8}",
    "data.sequence_length=32",
    "log.wandb=disabled",
]
DEMO = "runs/demo/exports"
PRE_TRAINED = {"teacher": "teacher", "small": "tinybert"}  # in runs/bert: the demo's that stand in
# What the guide calls things that the reader has.
PLACES = {
    "DIR": f"{DEMO}/teacher",
    "data.root=DATA": "data.root=data",
    "data.root=/data": "data.root=data",
    "data.validation=/data/reviews_train.csv": "data.validation=data/reviews_train.csv",
}
# A file of two parts: its header, and a row of two texts and a label.
TABLES = {
    "glue/SST-2/{}.tsv": ("sentence\tlabel", "{a}\t{label}"),
    "glue/CoLA/{}.tsv": ("", "x\t{label}\t\t{a}"),
    "glue/MRPC/{}.tsv": ("Quality\t#1 String\t#2 String", "{label}\t{a}\t{b}"),
    "glue/STS-B/{}.tsv": ("sentence1\tsentence2\tscore", "{a}\t{b}\t{label}.5"),
    "glue/RTE/{}.tsv": ("sentence1\tsentence2\tlabel", "{a}\t{b}\t{label}"),
    "qa_ranking/WikiQASent-{}.txt": ("", "{a}\t{b}\t{label}"),
    "reviews_{}.csv": ("review,stars", "{a},{label}"),
    "orders_{}.csv": ("review,price,age,stars", "{a},{number}.5,{number},{label}"),
}
TEXTS = [
    "the list is short",
    "a class has names",
    "an object is a value",
    "it was read and written",
]


def rows(count: int, row: str) -> Iterator[str]:
    for number in range(count):
        a, b = TEXTS[number % 4], TEXTS[number // 4 % 4]
        yield row.format(a=f"{a} {number}", b=b, label=number // 2 % 2, number=number)


def make_files(root: Path) -> None:
    """What the guide has its reader bring."""
    for name, (header, row) in TABLES.items():
        for part, count in (("train", 24), ("dev", 12)):
            path = root / name.format(part)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                "".join(f"{line}\n" for line in ([header] * bool(header)) + [*rows(count, row)])
            )
    pairs = root / "blimp" / "data" / "agreement.jsonl"
    pairs.parent.mkdir(parents=True)
    fields = ("sentence_good", "sentence_bad", "UID", "linguistics_term")
    pairs.write_text(
        json.dumps(dict(zip(fields, ("it is read", "it are read", "x", "y"), strict=True)))
    )
    Path("new_reviews.csv").write_text("review\nit was short\na class is a list\n")
    Path("new_orders.csv").write_text("review,price,age\nit was short,3.5,12\n")
    Path("more.csv").write_text("comment\nit was read\n")


def make_demo(text: Path, corpus: Path) -> None:
    """What `make demo` leaves: its text and its models, here narrow and barely trained."""
    Path("runs").mkdir()
    shutil.copy(text, "runs/demo-text.txt")
    widths = "vocab_size: 600, hidden_size: 32, ffn_size: 64, max_positions: 256"
    models = {
        "teacher": "demo_teacher",
        "students.distilbert": "demo_distilbert",
        "students.tinybert": "demo_tinybert",
    }
    narrow = [f"{name}.model={{base: {base}, {widths}}}" for name, base in models.items()]
    at_once = "students.distilbert.start=null"
    follow(["train", "demo", *narrow, at_once, f"data.path={corpus}", *SHORT])
    for name, own in PRE_TRAINED.items():
        shutil.copytree(f"{DEMO}/{own}", f"runs/bert/exports/{name}")


def follow(words: list[str]) -> None:
    done = tandem(*words)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"


def in_miniature(words: list[str]) -> list[str]:
    """A command of the guide with few steps, and at most two seeds."""
    words = ["1,2" if word == "1,2,3" else PLACES.get(word, word) for word in words]
    if "--suite" in words and "--seeds" not in words:
        words += ["--seeds", "1"]
    is_job = words[0] == "finetune" or "--suite" in words
    return [*words, "epochs=null", *SHORT] if is_job else words


@pytest.mark.slow
def test_the_guide_can_be_followed(text, corpus, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path / "data")
    for block in BLOCK.findall(PAGE.read_text()):
        if block.startswith("# mine.yaml"):
            Path("mine.yaml").write_text(block.replace("/data}", "data}"))
            continue
        for command in (shlex.split(line, comments=True) for line in block.splitlines()):
            if command == ["make", "demo"]:
                make_demo(text, corpus)
            elif command[0] == ".venv/bin/python":
                subprocess.run(
                    [sys.executable, *command[1:]], env=command_environment(), check=True
                )
            elif command[0] == "tandem":
                follow(in_miniature(command[1:]))
            else:
                assert block.startswith('{"row"'), f"neither a command nor an answer: {block}"
    check()


def check() -> None:
    """What the guide says there is at the end."""
    demo = json.loads(Path("runs/suites/demo/suite.json").read_text())
    assert set(demo["teacher"]["tasks"]) == {"order", "neighbours", "capitals", "pairs"}
    assert set(demo["tinybert"]["tasks"]["order"]["by_seed"]) == {"1", "2"}
    glue = json.loads(Path("runs/glue/suite.json").read_text())
    assert set(glue["small"]["tasks"]) == {"sst2", "mrpc", "stsb", "rte", "wikiqa", "cola"}
    mine = json.loads(Path("runs/mine/suite.json").read_text())
    assert set(mine["teacher"]["tasks"]) == {"stars", "blimp"}
    told = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [one["label"] in ("0", "1") for one in told] == [True, True]
    several = json.loads(Path("runs/mt_dnn-teacher/evaluation.json").read_text())
    assert several["metric"] == "task_mean"
