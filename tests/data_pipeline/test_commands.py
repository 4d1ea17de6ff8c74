"""The commands, through the real command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click.testing
import numpy as np
import pytest

import configs
from configs import progress
from data_pipeline import BatchStream, Corpus, DataConfig
from data_pipeline.building.build import Progress
from data_pipeline.building.checking import check
from data_pipeline.building.reporting import show_on, summary
from tandem import main
from tests.data_pipeline.conftest import make_documents
from trainer.config import JobConfig

SHIPPED = sorted(path.stem for path in (Path(configs.__file__).parent / "data").glob("*.yaml"))
JOBS = {path.stem for path in (Path(configs.__file__).parent / "job").glob("*.yaml")}
SMALL = ("batch.size=64", "batch.micro_batch=4")


def tandem(*arguments: object, code: int = 0, **options) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tandem", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def in_process(*arguments: object, code: int = 0) -> str:
    """The same command line, without starting a process."""
    done = click.testing.CliRunner().invoke(main, [str(one) for one in arguments])
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("task", ["", "1", "a/b", "1/" + "9" * 5000, "5/2"])
def test_invalid_slices_are_refused(tmp_path: Path, tokenizer_dir: Path, task: str) -> None:
    (tmp_path / "in.txt").write_text("Text.")
    build = ("data", "build", tmp_path / "in.txt", "--tokenizer", tokenizer_dir)
    said = in_process(*build, "--out", tmp_path / "out", "--task", task, code=2)
    assert "--task" in said
    assert not (tmp_path / "out").exists()


def test_from_text_to_batches(tmp_path: Path) -> None:
    text = tmp_path / "in.txt"
    text.write_text("\n\n".join(make_documents(200)))
    in_process("tokenizer", "train", text, "--kind", "wordpiece", "--vocab-size", 250,
               "--out", tmp_path / "tokenizer")  # fmt: skip
    build = ("data", "build", text, "--tokenizer", tmp_path / "tokenizer", "--val-fraction", 0.1)
    out = tandem(*build, "--out", tmp_path / "corpus")
    assert sum(map(int, re.findall(r"(\d+) documents", out))) == 200
    for task in (1, 2):
        in_process(*build, "--out", tmp_path / "array", "--task", f"{task}/2")
    in_process("data", "merge", tmp_path / "array")
    assert "as it was built" in in_process("data", "check", tmp_path / "array")
    dump = (
        "data",
        "dump",
        "roberta",
        *SMALL,
        "data.sequence_length=32",
        "--steps",
        "3:5",
        "--world-size",
        4,
    )
    for name in ("corpus", "array"):
        in_process(
            *dump, f"data.path={tmp_path / name}", "--rank", 2, "--out", tmp_path / f"{name}.npz"
        )
    found = np.load(tmp_path / "corpus.npz")
    stream = BatchStream(
        Corpus.open(str(tmp_path / "corpus")).split("train"),
        DataConfig(path="x", sequence_length=32),
        0, 64, 2, 4,
    )  # fmt: skip
    for nth, step in enumerate((3, 4)):
        batch, rows = stream.batch(step), slice(16 * nth, 16 * nth + 16)
        assert (found["step"][rows] == step).all()
        for name in ("sample_ids", "input_ids", "segment_ids", "attention_mask"):
            np.testing.assert_array_equal(found[name][rows], getattr(batch, name))
        np.testing.assert_array_equal(found["labels"][rows], batch.labels())
    assert (found["pair_labels"] == -100).all()
    damaged = tmp_path / "corpus" / "train" / "shard-000000.tar"
    damaged.write_bytes(damaged.read_bytes()[:-3000])
    assert "shard-000000.tar" in tandem("data", "check", tmp_path / "corpus", code=1)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """A folder with what the shipped configs name."""
    folder = tmp_path_factory.mktemp("corpora")
    for name in ("corpus", "wiki", "books"):
        shutil.copytree(corpus.folder, folder / name)
    return folder


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config(
    corpora: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(corpora)
    monkeypatch.setenv("FORCE_COLOR", "1")
    short = "data.sequence_length=64" if name in JOBS else "sequence_length=64"
    small = SMALL if name in JOBS else ()
    shown = in_process("data", "show", name, short, *small)
    assert shown.startswith("padding: ")
    assert shown.count("sample") == 4
    assert "[MASK]" in shown
    assert "\x1b[" in shown
    out = tmp_path / "out.npz"
    in_process("data", "dump", name, short, *small, "--steps", "0:2", "--world-size", 2,
               "--rank", 1, "--out", out)  # fmt: skip
    found = np.load(out)
    assert found["input_ids"].shape == (64, 64)
    assert set(found["pair_labels"]) == ({0, 1} if name in ("bert", "albert") else {-100})
    assert len(set(zip(found["step"].tolist(), found["sample_ids"].tolist(), strict=True))) == 64


def test_a_name_is_that_of_a_job_as_in_train(corpora: Path, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(corpora)
    out = tmp_path / "out.npz"
    in_process("data", "dump", "bert", *SMALL, "seed=5", "--steps", "0:1", "--out", out)
    job = configs.load("bert", JobConfig, "job", [*SMALL, "seed=5"])
    stream = BatchStream.open(job.data, "train", 5, 64, 0, 1)
    assert np.array_equal(np.load(out)["input_ids"], stream.batch(0).input_ids)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for arguments, message in (
        (("data", "check", tmp_path / "none"), "no such corpus"),
        (("data", "merge", tmp_path), "holds no parts"),
        (("data", "show", "roberta", f"data.path={tmp_path / 'none'}"), "no such corpus"),
        (("data", "show", "roberta", "data.packing=tight"), "data.packing: must be one of"),
        (("data", "dump", "nothing", "--steps", "0:1", "--out", "x"), "nothing"),
    ):
        out = in_process(*arguments, code=1)
        assert message in out
        assert len(out.strip().splitlines()) == 1
    in_process("data", "dump", "roberta", "--steps", "five", "--out", "x", code=2)


def test_the_progress_of_a_build_shows_rate_and_time_left(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.1)
    with progress.shown(), progress.work("building", "MB") as told:
        show = show_on(told)
        for done in (10, 40):
            show(Progress(done * 10**6, 80 * 10**6, done, done * 1000))
            time.sleep(0.15)
        show(Progress(40 * 10**6, 80 * 10**6, 40, 40_000))
    shown = capsys.readouterr().err
    assert "building: 40 of 80 MB · 40 documents, " in shown
    assert re.search(r"[1-9][\d,]* tokens/s · 0s · 0s left", shown)


def test_summary_has_counts_and_a_histogram(make_corpus: Callable[..., Corpus]) -> None:
    corpus = make_corpus(make_documents(30))
    tree = json.loads((corpus.folder / "corpus.json").read_text())
    text = summary(tree)
    total = tree["splits"]["train"]["documents"] + tree["splits"]["val"]["documents"]
    assert total == 30
    assert "tokens per document" in text
    assert sum(int(line.split()[2].replace(",", "")) for line in text.splitlines()
               if line.strip().startswith("<")) == 30  # fmt: skip
    assert check(str(corpus.folder)) == []


def test_a_mixture_with_a_rare_corpus_is_shown_from_the_jobs_own_batches(
    make_corpus: Callable[..., Corpus], tmp_path: Path
) -> None:
    often, seldom = (make_corpus(make_documents(40, seed)).folder for seed in (1, 2))
    path = tmp_path / "mixed.yaml"
    path.write_text(
        f"mixture: {{often: {{path: {often}, weight: 9}}, seldom: {{path: {seldom}}}}}\n"
        "sequence_length: 32\n"
    )
    assert in_process("data", "show", path, "--samples", 3).count("tokens, ") == 3


def test_samples_of_each_phase_are_shown_with_what_their_pairs_are(
    make_corpus: Callable[..., Corpus], tmp_path: Path
) -> None:
    path = tmp_path / "phases.yaml"
    path.write_text(
        "base: demo\nbatch: {size: 8, micro_batch: 8}\ndata:\n  sequence_length: 32\n"
        f"  path: {make_corpus(make_documents(60)).folder}\n"
        "  phases: [{from_step: 1, packing: segment_pair}, {from_step: 2, packing: sop}]\n"
    )
    shown = in_process("data", "show", path, "--samples", 24)
    said = [line.split("segment: ")[-1] for line in shown.splitlines() if " to predict" in line]
    assert not any("another" in one or "order" in one for one in said[:8])
    assert set(said[8:16]) == {"next", "from another document"}
    assert set(said[16:]) == {"in order", "swapped"}


def test_samples_of_a_text_that_is_shorter_than_a_batch_are_shown(
    make_corpus: Callable[..., Corpus],
) -> None:
    folder = make_corpus(make_documents(10)).folder
    words = ("roberta", f"data.path={folder}", "data.sequence_length=64", "--samples", 1)
    assert in_process("data", "show", *words).count("tokens, ") == 1


def test_a_job_that_only_names_its_base_is_a_job(tmp_path: Path) -> None:
    path = tmp_path / "same.yaml"
    path.write_text("base: demo\n")
    assert in_process("model", path) == in_process("model", "demo")


def test_a_tokenizer_reads_the_field_that_is_named_and_no_standard_input(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in make_documents(20)))
    train = ["tokenizer", "train", "--kind", "wordpiece", "--vocab-size", 300, "--out"]
    in_process(*train, tmp_path / "out", path, "--field", "body")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    refused = in_process(*train, tmp_path / "other", "-", code=1)
    assert "-: a tokenizer reads its text several times" in refused
