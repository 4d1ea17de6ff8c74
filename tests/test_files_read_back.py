"""Small JSON files that commands read back: every nested edit is refused or does no harm."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import tandem
from commands.analysis import NUMBERS, _has_pruned, _refuse_other_files
from commands.suite_runs import MODELS, _known_digests
from data_pipeline import DataError
from model import ModelError, build, from_pretrained, save_pretrained
from tests.damage import damages, edits, harmed
from tests.trainer import tiny
from trainer.checkpoint.attempts import Owner, published
from trainer.checkpoint.folder import Ranking, Retention, scores_of, step_name
from trainer.control import STOP, RequestBox, answer_to, ask
from trainer.errors import TrainingError
from trainer.report.table import student_table
from trainer.run_folder.run_files import primary_of, read_evaluation
from trainer.stored_logits.format import Manifest, ShardRecord, write_shard
from trainer.suites import task_score
from trainer.task_facts import TaskFacts, write_facts
from trainer.tasks.span import Span

LEARNER: dict[str, Any] = {
    "parameters": 5, "bytes": 20, "flops_per_token": 3.5, "accuracy": 0.5,
    "corpora": {"data": {"accuracy": 0.5}}, "retention": 1.0,
    "agreement": {"top_1": 0.5, "kl": 0.1},
    "tokens_per_second": 5.0, "sequences_per_second": 2.0, "seconds_per_sequence": 0.5,
    "started_at": 0, "finished_at": None, "export": "out",
}  # fmt: skip
EVALUATION: dict[str, Any] = {
    "step": 3, "seconds": 1.5, "machine": "a, b", "metric": "accuracy", "test": {"a": "0f"},
    "teacher_score": 0.5,
    "corpus": {"path": "a", "documents": 2, "tokens": 3, "validation_tokens": 1},
    "columns": [{"name": "accuracy", "heading": "a", "form": "share", "higher_is_better": True}],
    "unigram": {"loss": 2.0}, "learners": {"teacher": LEARNER, "students/a": LEARNER},
}  # fmt: skip


@pytest.mark.slow
def test_an_edited_evaluation_is_used_or_taken_for_none(tmp_path: Path) -> None:
    path, refused = tmp_path / "evaluation.json", 0
    path.write_text(json.dumps(EVALUATION))
    assert read_evaluation(path) == EVALUATION
    for damage in edits(path.read_bytes()):
        with harmed(path, damage):
            results = read_evaluation(path)
        refused += results is None
        if results is not None:
            assert primary_of(results).name == results["metric"]
            student_table(results)
            task_score({1: results})
    assert refused > 300


def test_scores_that_are_no_numbers_are_undefined(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(EVALUATION).replace('"accuracy": 0.5', '"accuracy": NaN'))
    results = read_evaluation(path)
    assert results is not None
    assert results["learners"]["teacher"]["accuracy"] is None


@pytest.mark.parametrize("heads", [["span"], ["span", "other"]])
def test_an_edited_task_is_named(tmp_path: Path, heads: list[str]) -> None:
    settings = {"stride": 4, "unanswerable": True, "metrics": ["answer_f1"], "of_a_plugin": 1}
    facts = TaskFacts(("a", "b"), {"a": "x"}, 64, settings, {"span_null_threshold": 0.5})
    write_facts(tmp_path, dict.fromkeys(heads, facts))
    path, refused = tmp_path / "task.json", 0
    assert TaskFacts.read(tmp_path, "span").section(Span).stride == 4
    for damage in edits(path.read_bytes()):
        with harmed(path, damage):
            message = refusal(tmp_path)
        refused += bool(message)
        assert not message or ("task.json: " in message and "\n" not in message), damage.name
    assert refused > 60


def refusal(folder: Path) -> str:
    """Why the facts of the span head are refused; empty where they are of the right types."""
    try:
        read = TaskFacts.read(folder, "span")
        read.section(Span)
    except ModelError as error:
        return str(error)
    assert all(isinstance(one, str) for one in (*read.fields, *read.columns.values()))
    assert isinstance(read.sequence_length, int)
    assert all(isinstance(one, float) for one in read.scores.values())
    return ""


def test_edited_records_of_a_run_say_nothing(tmp_path: Path) -> None:
    attempts, requests = tmp_path / "attempts", tmp_path / "requests"
    attempts.mkdir()
    record = attempts / "000001.json"
    record.write_text(json.dumps({"attempt": 1, **vars(Owner.here()), "checkpoints": [1, 2]}))
    for damage in edits(record.read_bytes()):
        with harmed(record, damage):
            assert published(tmp_path / "checkpoints") == []
    ask(requests, STOP)
    path = requests / "stop.json"
    for damage in edits(path.read_bytes()):
        with harmed(path, damage):
            RequestBox(requests, reads=True).look()
            ask(requests, STOP)
    answer = requests / "stop.answer.json"
    answer.write_text(json.dumps({"id": "a", "step": 3, "error": None}))
    for damage in edits(answer.read_bytes()):
        with harmed(answer, damage):
            assert (answer_to(requests, STOP, "a") or {"step": 3})["step"] in (3, -1)


def test_edited_remarks_are_lines_or_none(tmp_path: Path) -> None:
    """The files of setbacks and of slow ranks, as `tandem status` shows them."""
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    for name in ("setbacks.json", "slow_ranks.json"):
        path = tmp_path / name
        path.write_text(json.dumps([{"learner": "a", "step": 3, "says": "students/a: learns"}]))
        for damage in [*edits(path.read_bytes()), *damages(path.read_bytes())]:
            with harmed(path, damage):
                ended = CliRunner().invoke(tandem.main, ["status", str(tmp_path), "--json"])
            assert (ended.exit_code, ended.exception) == (0, None), damage.name
            (shown,) = json.loads(ended.stdout)
            for line in (*shown["setbacks"], *shown["slow_ranks"]):
                assert isinstance(line, str)
                assert (
                    line.startswith("students/a") or "says" in damage.name or "flip" in damage.name
                )
                assert len(line.splitlines()) <= 1


def test_an_edited_file_of_the_trainer_ranks_no_checkpoint(tmp_path: Path) -> None:
    (folder := tmp_path / step_name(3)).mkdir()
    ranking, path = Ranking("teacher", "loss"), folder / "trainer.json"
    score = {"metric": "loss", "value": 0.5}
    path.write_text(
        json.dumps({"step": 3, "attempt": 1, "scores": {"teacher": score}, "state": {}})
    )
    assert ranking.ranked({3: scores_of(tmp_path, 3)}) == [3]
    for damage in [*edits(path.read_bytes()), *damages(path.read_bytes())]:
        with harmed(path, damage):
            assert ranking.ranked({3: scores_of(tmp_path, 3)}) in ([], [3]), damage.name
            assert published(tmp_path) == [3]
            Retention(best=1, rankings=(ranking,)).expired({3: scores_of(tmp_path, 3)}, [])


@pytest.mark.slow
def test_an_edited_config_of_a_model_is_named_or_used(tmp_path: Path) -> None:
    config = tiny.encoder(vocab_size=20, layers=1, max_positions=8)
    save_pretrained(build(config, seed=0), tmp_path)
    path, refused = tmp_path / "config.json", 0
    for damage in edits(path.read_bytes()):
        with harmed(path, damage):
            try:
                read = from_pretrained(tmp_path).config
            except ModelError as error:
                assert str(tmp_path) in str(error), damage.name  # noqa: PT017
                assert "\n" not in str(error), damage.name  # noqa: PT017
                refused += 1
            else:
                assert read.vocab_size == 20, damage.name
    assert refused > 60


def test_an_edited_manifest_of_stored_logits_is_refused(tmp_path: Path) -> None:
    digest = "0" * 64
    shards = [ShardRecord(f"shard-00000000{n}.safetensors", n, 1, 3, 9, digest) for n in range(2)]
    manifest = Manifest("name: x", {"data": "0f"}, digest, shards)
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    path = tmp_path / "manifest.json"
    for damage in edits(path.read_bytes()):
        with harmed(path, damage):
            try:
                read = Manifest.load(tmp_path)
            except TrainingError as error:
                assert "manifest.json: is damaged" in str(error)  # noqa: PT017
                continue
        assert read == manifest, damage.name


def test_a_manifest_of_stored_logits_in_other_white_space_is_read(tmp_path: Path) -> None:
    record = write_shard(tmp_path, range(2), 3, b"content")
    manifest = Manifest("name: x", {"data": "0f"}, "").with_shard(record)
    tree = dataclasses.asdict(manifest)
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    text = json.dumps({**tree, "sha256": digest}, indent=1)
    (tmp_path / "manifest.json").write_text(text)
    assert Manifest.load(tmp_path).digest == digest
    manifest.save(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text()) == json.loads(text)


def test_a_shard_of_other_content_is_missing(tmp_path: Path) -> None:
    record = write_shard(tmp_path, range(2), 3, b"content")
    manifest = Manifest("name: x", {}, "").with_shard(record)
    assert list(manifest.missing(tmp_path, 2)) == []
    (tmp_path / record.file).write_bytes(b"c0ntent")
    assert list(manifest.missing(tmp_path, 2)) == [range(2)]


def test_edited_bounds_of_shards_are_refused_without_a_checksum(tmp_path: Path) -> None:
    manifest = Manifest("name: x", {}, "", [write_shard(tmp_path, range(2), 3, b"content")])
    manifest.save(tmp_path)
    tree = json.loads((tmp_path / "manifest.json").read_text())
    del tree["sha256"]
    for key, value in {"steps": 0, "first": 1, "file": "../a", "bytes": -1}.items():
        changed = {**tree, "shards": [{**tree["shards"][0], key: value}]}
        (tmp_path / "manifest.json").write_text(json.dumps(changed))
        with pytest.raises(TrainingError, match="is damaged"):
            Manifest.load(tmp_path)


def test_an_edited_analysis_or_record_of_a_suite_is_refused_or_used(tmp_path: Path) -> None:
    tree = {"model": "m", "examples": "a.txt", "scored": "x", "patterns": {}, "pruned": {"a": 1}}
    cases: list[tuple[str, dict[str, Any], Callable[[], Any]]] = [
        (NUMBERS, tree, lambda: _refuse_other_files(tmp_path, "m", "a.txt")),
        (NUMBERS, tree, lambda: _has_pruned(tmp_path / NUMBERS)),
        (MODELS, {"m": "0f"}, lambda: _known_digests(tmp_path)),
    ]
    for name, content, read in cases:
        path = tmp_path / name
        path.write_text(json.dumps(content))
        read()
        for damage in [*edits(path.read_bytes()), *damages(path.read_bytes())]:
            if not damage.is_folder:
                with harmed(path, damage), suppress(DataError):
                    read()
