"""Saving while training goes on."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.attempts import Attempt
from trainer.checkpoint.carried import Carried
from trainer.checkpoint.errors import CheckpointError, StaleAttempt
from trainer.checkpoint.folder import tidy
from trainer.checkpoint.gate import Gate
from trainer.checkpoint.layout import torch_optimizer
from trainer.checkpoint.publication import Shelf, Unit, publish
from trainer.checkpoint.ranks import Ranks
from trainer.checkpoint.reader import Checkpoint
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.snapshot import HostBuffer, Sketch, Snapshot, sketch
from trainer.durable import sync_folder

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


_LOG = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes a run's checkpoints, at most one at a time, in a thread. Creating it is collective.

    Every rank makes the same calls. The state is copied into host memory, which is allocated once
    for each learner, while the next forward and backward passes run: training waits only if the
    optimizers' next step comes before the copy is made. A save that is asked for while the one
    before is still being written waits for that first.
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
        """Prepare to write.

        Args:
            folder: ``runs/NAME/checkpoints``, on a file system that all ranks share.
            retention: what to keep.
            attempt: this incarnation of the run; None in a run without fencing.
            report: called on rank 0, from the writing thread, with one line about a failed save,
                or about a checkpoint that is suspect.
            resumed_from: the step this run was resumed from, which is never deleted.
            max_failures: so many failed saves in a row are an error.

        Raises:
            StaleAttempt, CheckpointError: on every rank, when a newer attempt has begun, or rank 0
                cannot make the folder.
        """
        self.last_published: int | None = resumed_from
        self.failures = 0
        self._report = report
        self._max_failures = max_failures
        self._in_a_row = 0
        self._error: CheckpointError | None = None
        self._thread: threading.Thread | None = None
        self._buffers: dict[str, HostBuffer] = {}
        self._gate = Gate()
        self._ranks = Ranks()
        pinned = frozenset(() if resumed_from is None else (resumed_from,))
        self._shelf = Shelf(folder, retention, attempt, pinned)
        self._ranks.agree(lambda: self._prepare() if self._ranks.rank == 0 else None)

    def save(
        self,
        step: int,
        learners: Mapping[str, DeepSpeedEngine],
        trainer_state: Mapping[str, Any],
        *,
        metric: float | None = None,
        wait: bool = False,
        then: Callable[[CheckpointError | None], None] | None = None,
        carried: Collection[str] = (),
        metrics: Callable[[], bytes] | None = None,
        evaluations: Mapping[str, tuple[int, float]] = MappingProxyType({}),
    ) -> None:
        """Copy the state of all learners as it is now, and write it, in the background.

        Call between optimizer steps, not inside gradient accumulation. What else than an optimizer
        is to change weights or states calls :meth:`copied` before.

        Args:
            step: the checkpoint's name: steps done.
            learners: engines by "teacher" or "students/NAME".
            trainer_state: anything JSON; rank 0's is stored.
            metric: a held-out score for ``Retention.best``; a non-finite one counts as none.
            wait: return when the checkpoint is published.
            then: called on rank 0, from the writing thread, when the checkpoint is published, or
                with the reason why it is not.
            carried: learners without engines, who go over from the last published checkpoint.
            metrics: the newest rows of the run's metrics; called on rank 0, from the writing
                thread, before the checkpoint is published.
            evaluations: the step and the loss (nats) of each learner's newest held-out evaluation.

        Raises:
            StaleAttempt, CheckpointError: as :meth:`wait` does, about the save before; with
                ``wait`` also when this save fails.
        """
        self.wait()
        usable = metric is not None and math.isfinite(metric)
        trainer = {"step": step, "metric": metric if usable else None, "state": trainer_state}
        sketches = {
            name: sketch(engine, self._ranks.rank, self._ranks.size)
            for name, engine in learners.items()
        }
        # Through JSON: a copy that the trainer cannot change any more, and proof that it is plain.
        plain = json.loads(json.dumps(trainer))
        unit = Unit(step, {}, plain, self._carried(carried), metrics, dict(evaluations))
        optimizers = map(torch_optimizer, learners.values())
        self._gate.close(optimizer for optimizer in optimizers if optimizer is not None)
        self._thread = threading.Thread(
            target=self._write, args=(unit, sketches, then), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()
        if wait and not self.wait() and self._error:
            raise self._error

    def copied(self) -> None:
        """Return when what is being saved may change again; optimizers call this by themselves."""
        self._gate.wait()

    def wait(self) -> bool:
        """Return when nothing is being written: whether the last save was published.

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
        self._shelf.check_attempt()  # building the learners may have taken long
        self._shelf.folder.mkdir(parents=True, exist_ok=True)
        sync_folder(self._shelf.folder.parent)
        tidy(self._shelf.folder, self._shelf.number)

    def _carried(self, learners: Collection[str]) -> Carried:
        for name in learners:
            self._buffers.pop(name, None)
        if not learners:
            return Carried()
        assert self.last_published is not None, "a learner to carry over is in a checkpoint"
        return Carried.of(Checkpoint(self._shelf.folder, self.last_published), learners)

    def _buffer(self, learner: str) -> HostBuffer:
        return self._buffers.setdefault(learner, HostBuffer())

    def _write(
        self,
        unit: Unit,
        sketches: Mapping[str, Sketch],
        then: Callable[[CheckpointError | None], None] | None,
    ) -> None:
        try:
            snapshots = self._ranks.agree(lambda: self._copy(sketches))
            suspect = publish(replace(unit, learners=snapshots), self._shelf, self._ranks)
        except Exception as error:
            self._fail(unit.step, error)
        else:
            self._error, self._in_a_row = None, 0
            self.last_published = unit.step
            if suspect:
                self._report(f"checkpoint of step {unit.step} is suspect: {suspect}")
        if then and self._ranks.rank == 0:
            then(self._error)

    def _copy(self, sketches: Mapping[str, Sketch]) -> dict[str, Snapshot]:
        try:
            return {name: one.copy(self._buffer(name)) for name, one in sketches.items()}
        finally:
            self._gate.open()

    def _fail(self, step: int, error: Exception) -> None:
        if not isinstance(error, CheckpointError):
            error = CheckpointError(f"{type(error).__name__}: {error}")
        self._error = error
        self.failures += 1
        self._in_a_row += 1
        if self._ranks.rank == 0:
            self._report(f"checkpoint of step {step} not written: {self._error}")
