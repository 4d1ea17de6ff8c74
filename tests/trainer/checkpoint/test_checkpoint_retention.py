"""Which checkpoints are kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer import jobs
from tests.trainer.checkpoint.saving import Alone, content, plain_engine
from trainer import job
from trainer.checkpoint import writer
from trainer.checkpoint.attempts import Attempt, published
from trainer.checkpoint.folder import (
    Ranking,
    Retention,
    scores_by_step,
    scores_of,
    step_name,
    write_json,
)
from trainer.checkpoint.publication import Save, Store, publish
from trainer.checkpoint.writer import CheckpointWriter

METRICS = {100: 5.0, 200: 2.0, 300: None, 400: 3.0, 500: 2.0, 600: 4.0}
LOSS = (Ranking("teacher", "loss"),)
ACCURACY = (Ranking("teacher", "accuracy", highest=True),)


def stored(metric: str = "loss", **values: float | None) -> dict[str, Any]:
    """The scores of learners as a checkpoint stores them."""
    return {
        name: {"metric": metric, "value": value}
        for name, value in values.items()
        if value is not None
    }


def of_teacher(metrics: dict[int, float | None]) -> dict[int, dict[str, Any]]:
    return {step: stored(teacher=value) for step, value in metrics.items()}


@pytest.mark.parametrize(
    ("retention", "pinned", "kept"),
    [
        (Retention(last=1), [], [600]),
        (Retention(last=2), [], [500, 600]),
        (Retention(last=1, every=200), [], [200, 400, 600]),
        (Retention(last=1, best=1, rankings=LOSS), [], [200, 600]),
        (Retention(last=1, best=3, rankings=LOSS), [], [200, 400, 500, 600]),
        (Retention(last=1, best=1, rankings=(Ranking("teacher", "loss", True),)), [], [100, 600]),
        (Retention(last=1), [300], [300, 600]),
        (Retention(last=9), [], [100, 200, 300, 400, 500, 600]),
    ],
)
def test_examples(retention: Retention, pinned: list[int], kept: list[int]) -> None:
    expired = retention.expired(of_teacher(METRICS), pinned)
    assert [step for step in METRICS if step not in expired] == kept


def test_scores_from_before_a_learners_start_do_not_count(tmp_path: Path) -> None:
    """As those of a student that was dropped, for one that has its name."""
    for step, start in ((2, 0), (4, 0), (8, 6)):
        folder = tmp_path / step_name(step)
        folder.mkdir()
        starts = {"teacher": {"started_at": 0}, "students/a": {"started_at": start}}
        scores = stored(teacher=float(step), **{"students/a": float(step)})
        write_json(folder, "trainer.json", {"scores": scores, "state": {"learners": starts}})
    ranking, *_ = LOSS
    assert ranking.ranked(scores_by_step(tmp_path, [2, 4, 8])) == [2, 4, 8]
    assert Ranking("students/a", "loss").ranked(scores_by_step(tmp_path, [2, 4])) == [2, 4]
    assert Ranking("students/a", "loss").ranked(scores_by_step(tmp_path, [2, 4, 8])) == [8]


@given(
    st.dictionaries(st.integers(0, 99), st.none() | st.floats(0, 9)),
    st.integers(1, 5),
    st.none() | st.integers(1, 9),
    st.integers(0, 3),
)
def test_retention_is_idempotent(
    metrics: dict[int, float | None], last: int, every: int | None, best: int
) -> None:
    retention = Retention(last, every, best, LOSS)
    expired = retention.expired(of_teacher(metrics), ())
    left = {step: scores for step, scores in of_teacher(metrics).items() if step not in expired}
    assert retention.expired(left, ()) == []
    assert max(metrics, default=None) == max(left, default=None)


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": 0}, {"best": -1}])
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Retention(**wrong)


def test_a_run_keeps_the_last_the_best_and_the_one_it_resumed_from(tmp_path: Path) -> None:
    store = Store(
        tmp_path / "checkpoints",
        Retention(last=2, best=1, rankings=LOSS),
        Attempt.begin(tmp_path),
        pinned=frozenset([1]),
    )
    store.folder.mkdir()
    for step, loss in enumerate([9.0, 3.0, 8.0, 7.0, 6.0, 5.0], start=1):
        publish(saved(step, loss), store, Alone())  # type: ignore[arg-type]
    assert published(store.folder) == [1, 2, 5, 6]


def test_each_learner_keeps_its_own_best() -> None:
    rankings = (*ACCURACY, Ranking("students/small", "loss"))
    scores = {
        step: {**stored("accuracy", teacher=accuracy), **stored("loss", **{"students/small": loss})}
        for step, accuracy, loss in ((1, 0.5, 3.0), (2, 0.7, 2.0), (3, 0.6, 1.0), (4, 0.1, 9.0))
    }
    retention = Retention(last=1, best=1, rankings=rankings)
    assert retention.expired({**scores, 5: {}}, ()) == [1, 4]
    assert retention.expired({**scores, 5: {}}, (), suspect=[2, 3]) == [2, 3, 4]


def saved(step: int, loss: float, **more: Any) -> Save:
    made = content(step)
    scores = {"scores": stored(teacher=loss), **more}
    return Save(step, made.learners, {**made.trainer, **scores})


def test_values_of_another_metric_are_not_ranked(tmp_path: Path) -> None:
    """A loss of 6.3 is no accuracy; the checkpoint of an old version has a value without a name."""
    by_accuracy = Retention(last=1, best=1, rankings=ACCURACY)
    store = Store(tmp_path / "checkpoints", by_accuracy, None, frozenset())
    store.folder.mkdir()
    publish(saved(1, 6.3), store, Alone())  # type: ignore[arg-type]
    publish(saved(2, 0.3, scores={}, metric=0.3), store, Alone())  # type: ignore[arg-type]
    for step, accuracy in ((3, 0.2), (4, 0.4), (5, 0.1), (6, 0.3)):
        save = saved(step, accuracy, scores=stored("accuracy", teacher=accuracy))
        publish(save, store, Alone())  # type: ignore[arg-type]
        assert published(store.folder) == {3: [2, 3], 4: [4], 5: [4, 5], 6: [4, 6]}[step]


def save_all(checkpoints: CheckpointWriter, metrics: dict[int, float]) -> None:
    for step, metric in metrics.items():
        engines = {"teacher": plain_engine(float(step))}
        checkpoints.save(step, engines, {}, scores={"teacher": metric}, wait=True)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "Ranks", Alone)


@pytest.mark.usefixtures("alone")
def test_the_checkpoint_that_a_run_resumed_from_is_never_deleted(tmp_path: Path) -> None:
    folder, metrics = tmp_path / "checkpoints", {2: 2.0, 3: 3.0, 4: 4.0}
    save_all(CheckpointWriter(folder, Retention(last=1)), {1: 9.0})
    save_all(CheckpointWriter(folder, Retention(last=1), resumed_from=1), metrics)
    assert published(folder) == [1, 4]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("metric", "best"), [("loss", 2), ("accuracy", 3)])
def test_a_job_keeps_the_best_by_its_primary_metric(tmp_path: Path, metric: str, best: int) -> None:
    made = writer_of_job(tmp_path, f"evaluation.metric={metric}")
    save_all(made, {1: 0.4, 2: 0.2, 3: 0.8, 4: 0.5})
    assert published(tmp_path / "tiny/checkpoints") == [best, 4]
    assert scores_of(tmp_path / "tiny/checkpoints", best)["teacher"]["metric"] == metric


@pytest.mark.usefixtures("alone")
def test_a_job_keeps_every_nth(tmp_path: Path) -> None:
    made = writer_of_job(tmp_path, "checkpoint.keep_every=2", "checkpoint.keep_best=0")
    save_all(made, dict.fromkeys(range(1, 6), 1.0))
    assert published(tmp_path / "tiny/checkpoints") == [2, 4, 5]


def writer_of_job(folder: Path, *words: str) -> CheckpointWriter:
    """The writer of a tiny job that keeps one checkpoint, in ``folder/tiny``."""
    config = jobs.tiny_job(folder, folder, "checkpoint.keep=1", "name=tiny", *words)
    run = folder / "tiny"
    run.mkdir()
    around = SimpleNamespace(attempt=Attempt.begin(run))
    return job._checkpoint_writer(config, around, SimpleNamespace(checkpoint=None))  # type: ignore[arg-type]
