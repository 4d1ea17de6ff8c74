"""Which checkpoints are suspect, and how they are treated."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from tests.trainer.checkpoint.saving import Alone, plain_engine
from trainer.checkpoint.attempts import published
from trainer.checkpoint.folder import Retention, step_name
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.publication import Save, Store, publish
from trainer.checkpoint.reader import newest_sound
from trainer.checkpoint.snapshot import (
    LOSS_JUMP,
    NORM_JUMP,
    Health,
    HostBuffer,
    measure,
    prepare_snapshot,
    suspicion,
)

BEFORE = Health(finite=True, norm=10.0, weights=100, evaluated_at=8, held_out=3.0)


def now(norm: float | None = 10.0, **more: object) -> Health:
    return Health(**{"finite": True, "norm": norm, "weights": 100, **more})


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (now(), ""),
        (now(10.0 * NORM_JUMP), ""),
        (now(10.0 * NORM_JUMP + 0.1), "the norm of its weights is 2.01 times that"),
        (now(10.0 / NORM_JUMP - 0.1), "the norm of its weights is 0.49 times that"),
        (now(14.1, weights=200), ""),
        (now(28.0, weights=800), ""),  # as large each, and more of them
        (now(90.0, evaluated_at=10, held_out=2.9), ""),  # it is known to be good
        (now(90.0, evaluated_at=9, held_out=2.9), "the norm"),  # that was before
        (now(evaluated_at=10, held_out=3.0 + LOSS_JUMP), ""),
        (now(evaluated_at=9, held_out=3.6), "its held-out loss rose from 3.000 to 3.600"),
        (now(evaluated_at=10, held_out=None), "its held-out loss at step 10 is not finite"),
        (now(None, finite=False), "its weights or optimizer states are not finite"),
        (now(finite=False), "its weights or optimizer states are not finite"),
    ],
)
def test_what_is_suspect(one, reason):
    found = suspicion(10, one, BEFORE)
    assert found.startswith(reason) if reason else found == ""


def test_without_a_sound_checkpoint_before_only_numbers_that_are_none_are_suspect():
    assert suspicion(10, now(1e9, evaluated_at=10, held_out=99.0), None) == ""
    assert suspicion(10, now(finite=False), None)


def content(step: int, engine: SimpleNamespace, loss: float | None = None) -> Save:
    evaluations = {} if loss is None else {"teacher": (step, loss)}
    trainer = {"step": step, "metric": loss, "state": {}}
    learners = {"teacher": prepare_snapshot(engine, 0, 1).copy(HostBuffer())}
    return Save(step, learners, trainer, evaluations=evaluations)


def test_measured_are_all_weights_and_every_number_of_the_optimizer():
    engine = plain_engine(3.0, size=2000)
    for parameter in engine.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    engine.optimizer.step()
    portion = measure(content(1, engine).learners["teacher"])
    weights = [p.detach().double() for p in engine.module.parameters()]
    assert portion.squares == pytest.approx(sum(float((w * w).sum()) for w in weights), rel=1e-12)
    assert (portion.weights, portion.finite) == (2000 * 2001, True)
    next(iter(engine.optimizer.state.values()))["exp_avg_sq"].view(-1)[-1] = math.inf
    assert not measure(content(1, engine).learners["teacher"]).finite


def test_a_suspect_checkpoint_is_kept_and_pushes_out_none_that_is_sound(tmp_path):
    store = Store(tmp_path / "checkpoints", Retention(last=2, best=1), None, frozenset())
    store.folder.mkdir()

    def save(step: int, value: float, loss: float | None = None) -> str:
        return publish(content(step, plain_engine(value), loss), store, Alone())

    assert [save(step, 1.0, loss) for step, loss in ((1, 4.0), (2, 3.0), (3, 3.1))] == [""] * 3
    ruined = [save(4, 500.0), save(5, 500.0), save(6, 500.0, 2.0), save(7, 500.0)]
    assert "teacher: the norm of its weights is 500 times" in ruined[0]
    assert [bool(reason) for reason in ruined] == [True, True, False, False], (
        "6 is known to be good"
    )
    assert save(8, math.nan)
    assert published(store.folder) == [6, 7, 8]
    for step in (9, 10, 11):
        assert "not finite" in save(step, math.nan, 1.0)
    assert published(store.folder) == [6, 7, 10, 11]
    assert newest_sound(store.folder).step == 7
    assert newest_sound(store.folder, before=7).step == 6
    manifest = read_manifest(store.folder / step_name(11))
    assert manifest.suspect == "teacher: its weights or optimizer states are not finite"
    assert manifest.health["teacher"] == Health(False, None, 30, 11, 1.0)


def test_a_whole_history_of_ruin_leaves_the_checkpoints_before_it(tmp_path):
    store = Store(tmp_path / "checkpoints", Retention(last=2), None, frozenset())
    store.folder.mkdir()
    for step in range(1, 9):
        publish(content(step, plain_engine(1.0 if step < 5 else 99.0)), store, Alone())
    assert published(store.folder) == [3, 4, 7, 8]
