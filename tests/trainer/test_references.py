"""Scores compare with what was encoded, whatever becomes of the files it was read from."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline import Corpus, DataError
from model import build
from tests.damage import Damage, harmed
from tests.distributed import run_distributed
from tests.trainer import jobs, test_ranking_tasks, test_sentence_tasks, test_token_tasks
from tests.trainer import test_translation as translation
from trainer.config import JobConfig
from trainer.evaluation.held_out import ValidationSet
from trainer.job_data import encoding
from trainer.job_data.examples import with_examples
from trainer.learners.module import score


def span(folder: Path, corpus: Path) -> tuple[JobConfig, list[Path]]:
    (folder / "span_train").write_text(test_token_tasks.squad(9, 0))
    (folder / "span_dev").write_text(test_token_tasks.squad(9, 300))
    return test_token_tasks.load(folder, corpus, "span", 1, "{}"), [folder / "span_dev"]


def ranking(folder: Path, corpus: Path, task: str, *more: str) -> tuple[JobConfig, list[Path]]:
    names = ["corpus.jsonl", "queries.jsonl", "train.tsv", "dev.tsv", "run.txt"]
    texts = [{"_id": name, "text": text} for name, text in test_ranking_tasks.documents()]
    test_ranking_tasks.written(folder, names[0], texts)
    test_ranking_tasks.written(
        folder, names[1], [{"_id": f"q{n}", "text": one["text"]} for n, one in enumerate(texts)]
    )
    for name in names[2:4]:
        (folder / name).write_text("".join(f"q{n}\td{(n + 2) % 66}\t1\n" for n in range(20)))
    run = [f"q{n} Q0 d{(n + k) % 66} 1 {9 - k} x\n" for n in range(66) for k in range(1, 5)]
    (folder / names[4]).write_text("".join(run))
    load = (folder, corpus, task, 1, "{negatives: 1}", *more)
    return test_ranking_tasks.load(*load), [folder / name for name in names]


def translated(folder: Path, corpus: Path) -> tuple[JobConfig, list[Path]]:
    for language, words in (("xx", translation.WORDS), ("yy", translation.OTHERS)):
        with gzip.open(folder / f"train.{language}.gz", "wt") as file:
            file.write(translation.lines(20, 0, words))
        (folder / f"held_out.{language}").write_text(translation.lines(13, 100, words))
    job = with_examples(translation.load(folder, corpus))
    return job, [folder / "held_out.xx", folder / "held_out.yy"]


CASES: dict[str, Callable[[Path, Path], tuple[JobConfig, list[Path]]]] = {
    "span": span,
    "retrieval": lambda *at: ranking(*at, "retrieval", "data.validation=dev.tsv"),
    "retrieval of a part": lambda *at: ranking(*at, "retrieval", "data.validation_fraction=0.5"),
    "reranking": lambda *at: ranking(
        *at, "reranking", "data.validation=dev.tsv", "data.files.candidates=run.txt"
    ),
    "translation": translated,
}


def scores(job: JobConfig) -> dict[str, float | None]:
    """What an untrained teacher scores on the held-out examples."""
    metrics, model = job.metrics_of(job.teacher), build(job.teacher.architecture, seed=3).eval()
    validation = ValidationSet(job, {"": Corpus.open(job.data.path)})
    device = torch.device("cpu")
    return dict(
        validation.evaluate(lambda one: score(model, one, metrics), metrics, device).overall
    )


def reverse(path: Path) -> None:
    if path.name.startswith("span"):
        tree = json.loads(path.read_text())
        tree["data"][0]["paragraphs"].reverse()
        path.write_text(json.dumps(tree))
    else:
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))


@pytest.mark.parametrize("case", CASES)
def test_references_are_those_that_were_encoded(case, corpus, tmp_path) -> None:
    job, files = CASES[case](tmp_path, corpus)
    before = scores(job)
    assert any(before.values())
    for change in (reverse, lambda path: path.write_text(path.read_text()[:9]), Path.unlink):
        for path in files:
            change(path)
        assert scores(job) == before


def test_damaged_references_are_refused(corpus, tmp_path) -> None:
    job, _ = span(tmp_path, corpus)
    file = Path(job.data.path) / "val" / "references.json"
    file.write_text(file.read_text().replace("q30", "q40"))
    with pytest.raises(DataError, match=r"references.json: its SHA-256 differs"):
        scores(job)


def moods(folder: Path, corpus: Path) -> JobConfig:
    text = test_sentence_tasks.JOB.format(folder=folder, corpus=corpus, runs=folder / "runs")
    path = folder / "job.yaml"
    path.write_text(text)
    return jobs.configs.load(str(path), JobConfig, "job", ["steps=1", "students=null"])


@pytest.mark.parametrize("name", ["train.tsv", "held_out.tsv"])
def test_a_file_that_is_edited_between_hash_and_read_and_put_back_is_refused(
    name, corpus, tmp_path, monkeypatch
) -> None:
    for file in ("train.tsv", "held_out.tsv", "test.tsv"):
        (tmp_path / file).write_text("text\tlabel\nhe was\tdull\nthe\tbright\n")
    wrong = Damage("wrong labels", b"text\tlabel\nhe was\tbright\nthe\tdull\n")
    edited, identify, store = ExitStack(), encoding._identity, encoding.store_examples

    def identify_then_edit(*asked: Any) -> Any:
        identity = identify(*asked)
        edited.enter_context(harmed(tmp_path / name, wrong))
        return identity

    def put_back_after(rows: list[Any]) -> Iterator[Any]:
        yield from rows
        edited.close()

    def store_edited(*asked: Any) -> None:
        *before, rows, references, others = asked
        read = {split: put_back_after(list(rows[split])) for split in rows}
        store(*before, read, references, others)

    job = moods(tmp_path, corpus)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(encoding, "_identity", identify_then_edit)
        meanwhile.setattr(encoding, "store_examples", store_edited)
        with pytest.raises(DataError, match=f"{name}: was changed while it was read; repeat"):
            with_examples(job)
    assert not list((tmp_path / "runs" / encoding.FOLDER).glob("*/*"))
    assert Path(with_examples(job).data.path).is_dir()


def finished(folder: Path, corpus: Path) -> str:
    """Collective."""
    run = jobs.run(with_examples(moods(folder, corpus)))
    jobs.finish(run)
    return str(run.path)


@pytest.mark.slow
def test_a_changed_test_file_is_scored_again(corpus, tmp_path) -> None:
    rows = "text\tlabel\nhe was\tdull\nthe\tbright\n"
    for name in ("train", "held_out", "test"):
        (tmp_path / f"{name}.tsv").write_text(rows)
    (run,) = run_distributed(finished, 1, tmp_path, corpus)
    before = json.loads((Path(run) / "evaluation.json").read_text())
    (tmp_path / "test.tsv").write_text(f"{rows}of it\tdull\n")
    shutil.rmtree(Path(run) / "exports")
    run_distributed(finished, 1, tmp_path, corpus)
    after = json.loads((Path(run) / "evaluation.json").read_text())
    assert after["test"] != before["test"]
    was, now = (tree["learners"]["teacher"] for tree in (before, after))
    assert was["test_single_sentence_accuracy"] != now["test_single_sentence_accuracy"]
    assert was["single_sentence_accuracy"] == now["single_sentence_accuracy"]


def ranking_again(folder: Path, corpus: Path) -> JobConfig:
    words = "{negatives: 1}", "data.validation=dev.tsv"
    return test_ranking_tasks.load(folder, corpus, "retrieval", 1, *words)


def test_a_judgement_that_no_scorer_takes_is_refused(corpus, tmp_path) -> None:
    ranking(tmp_path, corpus, "retrieval", "data.validation=dev.tsv")
    (tmp_path / "dev.tsv").write_text(f"q0\td2\t{10**20}\n")
    with pytest.raises(DataError, match=r"dev.tsv:1: a relevance has at most 6 digits"):
        ranking_again(tmp_path, corpus)
