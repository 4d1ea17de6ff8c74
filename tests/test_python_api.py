"""The public Python API, by running the page that documents it."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import tandem
from commands.api import Example, _examples_file, _listed
from configs.errors import ConfigError, OptionError
from data_pipeline import DataError
from data_pipeline.task_files.tables import read_table
from tests.conftest import REPOSITORY, TINY_JOB, command_environment
from trainer.prediction.fine_tuned import tell_incomplete

PAGE = REPOSITORY / "docs/python.md"
# What the last block of the page leaves in its variables.
REPORT = """
import json
import torch

texts = ["a fine film", "a waste of time"]
tuned = "runs/reviews/exports/teacher"
print("REPORT " + json.dumps({
    "documents": corpus["splits"]["train"]["documents"],
    "trained": results["learners"]["teacher"]["loss"],
    "scored": sorted(scores["learners"]),
    "losses": [tree["learners"]["students/narrow"]["loss"] for tree in (results, scores)],
    "vectors": vectors.tolist(),
    "hidden": model.config.hidden_size,
    "logits": list(model(torch.tensor([[2, 7, 3]])).logits.shape),
    "texts": [row["label"] for row in tandem.predict(tuned, texts)],
    "mappings": [row["label"] for row in tandem.predict(tuned, [{"text": text} for text in texts])],
}))
"""
MODEL = {
    "base": "bert_tiny",
    "hidden_size": 32,
    "ffn_size": 64,
    "vocab_size": 600,
    "max_positions": 128,
}
LEARNS = {"objective": {"mlm": {}, "soft_kl": {"min_lead": None}}}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, corpus: Path, text: Path) -> dict:
    """What the page's blocks come to in one Python process, in a folder with what they read."""
    folder = tmp_path_factory.mktemp("python")
    (folder / "text").mkdir()
    (folder / "text/topics.txt").write_bytes(text.read_bytes())
    (folder / "tokenizer").symlink_to(corpus.parent / "tokenizer")
    job = {
        "base": str(TINY_JOB),
        "data": {"path": "corpora/first"},
        "students": {"distilbert": None, "tinybert": None, "narrow": {"model": MODEL, **LEARNS}},
    }
    (folder / "first.yaml").write_text(yaml.safe_dump(job))
    rows = [f"{word} film,{word}" for word in ("good", "bad")] * 16
    (folder / "reviews.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*blocks, REPORT])],
        cwd=folder,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1].removeprefix("REPORT "))


@pytest.mark.slow
def test_the_page_builds_trains_scores_and_exports(told: dict) -> None:
    assert told["documents"] > 50
    assert 0 < told["trained"] < 10
    assert told["scored"] == ["students/narrow"]
    assert told["losses"][0] == pytest.approx(told["losses"][1], rel=1e-6)
    assert np.isfinite(np.array(told["vectors"])).all()
    assert np.array(told["vectors"]).shape == (2, told["hidden"])
    assert told["logits"] == [1, 3, 600]


@pytest.mark.slow
def test_texts_and_mappings_are_predicted_alike(told: dict) -> None:
    assert told["texts"] == told["mappings"]
    assert {*told["texts"]} <= {"good", "bad"}


def test_the_names_are_those_of_the_page() -> None:
    named = {name for name in tandem.__all__ if name != "main"}
    text = PAGE.read_text()
    assert named == set(re.findall(r"tandem\.(\w+)\(", text))


def test_an_iterator_of_examples_is_read_from_its_first() -> None:
    rows = _listed(iter([{"text": "one"}, {"text": "two"}]))
    with _examples_file(rows, Path("unread")) as (path, columns):
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["one", "two"]
    assert columns == {}


def test_the_rows_of_a_data_frame_are_examples() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"text": ["good", None], "stars": [1, 2], "share": [0.5, float("nan")]}
    )
    rows = _listed(frame)
    assert rows == [
        {"text": "good", "stars": 1, "share": 0.5},
        {"text": None, "stars": 2, "share": None},
    ]
    with _examples_file([{"n": np.int64(3), "list": np.arange(2)}]) as (path, _):
        assert json.loads(Path(path).read_text()) == {"n": 3, "list": [0, 1]}


def test_columns_are_not_taken_for_texts(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^examples: is a mapping; give a list with a mapping for "
    ):
        tandem.predict(tmp_path, {"text": ["good", "bad"]})  # type: ignore[arg-type]


def test_errors_and_notes_about_a_list_name_its_items(caplog: pytest.LogCaptureFixture) -> None:
    given: list[Example] = [{"Text": "good"}]
    with (
        pytest.raises(DataError, match=r"^item 0: columns\.text: no column 'text'; did you mean"),
        _examples_file(given) as (path, _),
    ):
        [*read_table(path, {"text": "text"})]
    with _examples_file(given) as (path, _):
        tell_incomplete(path, 3, SimpleNamespace(cut=[]))  # type: ignore[arg-type]
    assert "examples: rows without a text, whose answers are null: 3" in caplog.messages
    with (
        pytest.raises(DataError, match=r"^a fine film: cannot be read: .*give a list: \[text\]$"),
        _examples_file("a fine film") as (path, _),
    ):
        [*read_table(path, {"text": "text"}, "csv")]


def test_of_no_texts_there_are_no_answers(tmp_path: Path) -> None:
    assert tandem.predict(tmp_path, []) == []
    with pytest.raises(OptionError, match=r"^TEXT: name at least one file or folder$"):
        tandem.build_corpus([], tmp_path, tmp_path / "corpus")


@pytest.mark.parametrize("option", ["workers=0", "shard_mb=nan", "shard_mb=inf", "val_fraction=1"])
def test_a_corpus_is_built_with_the_bounds_of_the_command(option: str, tmp_path: Path) -> None:
    name, value = option.split("=")
    number = int(value) if name == "workers" else float(value)
    with pytest.raises(OptionError, match=f"^--{name.replace('_', '-')}.*: must be "):
        tandem.build_corpus("a.txt", tmp_path, tmp_path / "corpus", **{name: number})


def test_a_corpus_may_have_the_tokens_of_a_student_too(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The first text.\n\nThe second one.\n")
    tokenizer = corpus.parent / "tokenizer"
    built = tandem.build_corpus(tmp_path / "text.txt", tokenizer, tmp_path / "out", also=tokenizer)
    assert len(built["tally"]["tokenizers"]) == 1


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"^.*stepz: unknown key; did you mean steps\?$"):
        tandem.load("demo", "stepz=3")
    with pytest.raises(Exception, match="not a run"):
        tandem.evaluate(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(Exception, match="exists"):
        tandem.export(tmp_path, "teacher", tmp_path)


def test_a_loaded_job_is_loaded_with_further_overrides_and_its_errors_name_no_file() -> None:
    job = tandem.load("demo", "steps=7")
    assert tandem.load(job, "name=other") == dataclasses.replace(job, name="other")
    with pytest.raises(ConfigError, match=r"^stepz: unknown key"):
        tandem.train(job, "stepz=3")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((None,), r"^None: is no job; give a file, a name, or "),
        (({"steps": 3},), r"^\{'steps': 3\}: is no job; "),
        (("demo", {"steps": 3}), r"^\{'steps': 3\} is not an override; write "),
        (("demo", Path("steps=3")), r"^PosixPath\('steps=3'\) is not an override; "),
    ],
)
def test_what_is_no_job_or_override_is_refused(arguments: Any, said: str) -> None:
    for function in (tandem.load, tandem.train):
        with pytest.raises(ConfigError, match=said):
            function(*arguments)


INTERRUPTED = """
import os, signal, sys, threading, time
import tandem

def interrupt():
    while not os.path.exists("runs/tiny/metrics.jsonl"):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)  # not the processes of the job

signal.signal(signal.SIGINT, signal.default_int_handler)  # also of tests started without it
threading.Thread(target=interrupt, daemon=True).start()
try:
    tandem.train(sys.argv[1], "data.path=" + sys.argv[2], "steps=100000", "log.every=10", nproc=1)
except KeyboardInterrupt:
    print("interrupted", os.listdir("runs/tiny/checkpoints"))
"""


def test_training_of_a_script_that_is_interrupted_alone_saves_and_ends(
    corpus: Path, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, TINY_JOB, corpus],
        cwd=tmp_path,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,
    )
    assert re.search(r"^interrupted \['step-", ended.stdout, re.M), ended.stderr
    (attempt,) = (tmp_path / "runs/tiny/attempts").iterdir()
    assert "ended" in json.loads(attempt.read_text())
