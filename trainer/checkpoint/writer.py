"""Saving checkpoints in the background, while training continues."""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from configs.durable import fsync
from trainer.checkpoint.attempts import Attempt
from trainer.checkpoint.carried import Carried
from trainer.checkpoint.folder import Retention, tidy
from trainer.checkpoint.layout import torch_optimizer
from trainer.checkpoint.publication import Ranks, Save, Store, publish
from trainer.checkpoint.reader import Checkpoint
from trainer.checkpoint.snapshot import (
    Gate,
    HostBuffer,
    PendingSnapshot,
    Snapshot,
    prepare_snapshot,
)
from trainer.errors import CheckpointError, StaleAttempt

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_LOG = logging.getLogger(__name__)
Then = Callable[[CheckpointError | None], None] | None  # what follows a save


class CheckpointWriter:
    """Writes a run's checkpoints, at most one at a time, in a thread. Creating it is collective.

    Every rank makes the same calls. The state is copied into host memory, allocated once per
    learner, during the next forward and backward passes. Training waits only if the next optimizer
    step comes before the copy is complete. A save waits until the previous one has been written.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        attempt: Attempt | None = None,
        report: Callable[[str], None] = _LOG.warning,
        *,
        resumed_from: int | None = None,
        max_failures: int = 3,
    ) -> None:
        """Check the attempt and make the folder.

        Args:
            folder: ``runs/NAME/checkpoints``, on a file system that all ranks share.
            retention: what to keep.
            attempt: this attempt at the run; None in a run without fencing.
            report: called on rank 0, from the writing thread, with one line about a failed save
                or a suspect checkpoint.
            resumed_from: the step that this run resumed from; its checkpoint is never deleted.
            max_failures: this many failed saves in a row raise an error.

        Raises:
            StaleAttempt, CheckpointError: on every rank, if a newer attempt has begun, or rank 0
                cannot make the folder.
        """
        self.last_published: int | None = resumed_from
        self.failures = 0
        self._report = report
        self._max_failures = max_failures
        self._in_a_row = 0
        self._error: CheckpointError | None = None
        self._thread: threading.Thread | None = None
        self._buffers: defaultdict[str, HostBuffer] = defaultdict(HostBuffer)
        self._gate = Gate()
        self._ranks = Ranks()
        pinned = frozenset(() if resumed_from is None else (resumed_from,))
        self._store = Store(folder, retention, attempt, pinned)
        self._ranks.agree(lambda: self._prepare() if self._ranks.rank == 0 else None)

    def save(
        self,
        step: int,
        learners: Mapping[str, DeepSpeedEngine],
        trainer_state: Mapping[str, Any],
        *,
        scores: Mapping[str, float] = MappingProxyType({}),
        wait: bool = False,
        then: Then = None,
        carried: Collection[str] = (),
        metrics: Callable[[], bytes] | None = None,
        evaluations: Mapping[str, tuple[int, float]] = MappingProxyType({}),
    ) -> None:
        """Copy the current state of all learners, and write it, in the background.

        Call between optimizer steps, not during gradient accumulation. An optimizer's next step
        waits for the copy by itself; other code must not change weights or states before
        :meth:`wait` returns.

        Args:
            step: the number of steps done, which names the checkpoint.
            learners: engines by "teacher" or "students/NAME".
            trainer_state: a JSON value; rank 0's is stored.
            scores: the learners' scores by which ``Retention.rankings`` rank, if just measured.
            wait: return when the checkpoint is published.
            then: called on rank 0, from the writing thread, after the save, with the error if it
                failed, else None.
            carried: finished learners, to copy from the last published checkpoint.
            metrics: the newest rows of the run's metrics; called on rank 0, from the writing
                thread, before the checkpoint is published.
            evaluations: the step and the loss (nats) of each learner's newest held-out evaluation.

        Raises:
            StaleAttempt, CheckpointError: as :meth:`wait`, about the previous save; with ``wait``
                also if this save fails.
        """
        self.wait()
        stored = self._store.retention.scores_to_store(scores)
        trainer = _plain({"step": step, "scores": stored, "state": trainer_state})
        save = Save(step, {}, trainer, self._carried(carried), metrics, dict(evaluations))
        self._start(save, learners, then)
        if wait and not self.wait() and self._error:
            raise self._error

    def _start(self, save: Save, learners: Mapping[str, DeepSpeedEngine], then: Then) -> None:
        pending = {
            name: prepare_snapshot(engine, self._ranks.rank, self._ranks.size)
            for name, engine in learners.items()
        }
        optimizers = map(torch_optimizer, learners.values())
        self._gate.close(optimizer for optimizer in optimizers if optimizer is not None)
        name = f"checkpoint-{save.step}"
        self._thread = threading.Thread(
            target=self._write, args=(save, pending, then), name=name, daemon=True
        )
        self._thread.start()

    def wait(self) -> bool:
        """Return when nothing is being written; True if the last save was published.

        Raises:
            StaleAttempt: a newer attempt of this run has begun.
            CheckpointError: ``max_failures`` saves in a row have failed.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
        if isinstance(self._error, StaleAttempt):
            raise self._error
        if self._error and self._in_a_row >= self._max_failures:
            raise CheckpointError(f"{self._in_a_row} saves in a row failed: {self._error}")
        return self._error is None

    def _prepare(self) -> None:
        self._store.check_attempt()  # building the learners may have taken long
        self._store.folder.mkdir(parents=True, exist_ok=True)
        fsync(self._store.folder.parent)
        tidy(self._store.folder, self._store.number)

    def _carried(self, learners: Collection[str]) -> Carried:
        for name in learners:
            self._buffers.pop(name, None)
        if not learners:
            return Carried()
        assert self.last_published is not None, "a finished learner is in a checkpoint"
        return Carried.of(Checkpoint(self._store.folder, self.last_published), learners)

    def _write(self, save: Save, pending: dict[str, PendingSnapshot], then: Then) -> None:
        try:
            snapshots = self._ranks.agree(lambda: self._copy(pending))
            suspect = publish(replace(save, learners=snapshots), self._store, self._ranks)
        except Exception as error:
            self._fail(save.step, error)
        else:
            self._error, self._in_a_row = None, 0
            self.last_published = save.step
            if suspect:
                self._report(f"the checkpoint of step {save.step} is suspect: {suspect}")
        if then and self._ranks.rank == 0:
            then(self._error)

    def _copy(self, pending: dict[str, PendingSnapshot]) -> dict[str, Snapshot]:
        """Take each learner's tensors off the device, and let go of them there."""
        try:
            return {name: pending.pop(name).copy(self._buffers[name]) for name in [*pending]}
        finally:
            self._gate.open()

    def _fail(self, step: int, error: Exception) -> None:
        if not isinstance(error, CheckpointError):
            error = CheckpointError(f"{type(error).__name__}: {error}")
        self._error = error
        self.failures += 1
        self._in_a_row += 1
        if self._ranks.rank == 0:
            self._report(f"the checkpoint of step {step} was not written: {self._error}")


def _plain(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``trainer.json``: a copy that the trainer cannot change.

    Raises TypeError where it is not plain JSON.
    """
    return json.loads(json.dumps(tree))
