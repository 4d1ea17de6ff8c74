"""Guards against bad losses: steps that are skipped, and rolling back to a checkpoint.

Everything here is a pure function of all-reduced losses and of checkpointed state. So every rank
decides alike, and a resumed run decides like an uninterrupted one.

The batch that a step reads is a pure function of the step and the config. The trainer's state
records the entries that have been applied, so that a later start does not roll back again.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch.distributed as dist

from configs.rules import FRACTION, INDEX, Ascending, Length, Range, Unit, positive
from configs.section import Refusal, Section
from trainer.checkpoint.attempts import published
from trainer.checkpoint.reader import Checkpoint, intact
from trainer.errors import TrainingError

LOSS, SPIKE, GRADIENT = "loss not finite", "loss spike", "gradient not finite"


@dataclass
class GuardConfig(Section):
    """Which losses skip a step, and how many steps in a row may be skipped."""

    sigmas: Annotated[
        float | None,
        positive(1e6),
        Unit("standard deviations"),
        "A loss spikes, and its step is skipped, when it is this far above the mean "
        "loss of the last `window` steps, once that many have been taken. null: only "
        "steps with a non-finite loss or gradient are skipped.",
    ] = 6.0
    window: Annotated[int, Range(2, 10**6), Unit("losses"), "The number of losses in the mean."] = (
        128
    )
    max_consecutive_skips: Annotated[
        int, INDEX, Unit("skips"), "The job fails after more than this many skips in a row."
    ] = 10
    max_skipped_fraction: Annotated[
        float,
        FRACTION,
        "The job fails at its end if a larger fraction of the learner's steps was skipped. It "
        "also fails if the last step was skipped.",
    ] = 0.5


@dataclass
class Guard:
    """The state of one learner's guard."""

    losses: list[float] = field(default_factory=list)  # of the last steps taken
    regime: str = ""  # the regime of these losses
    by_task: dict[str, list[float]] = field(default_factory=dict)  # of a job of several tasks
    in_a_row: int = 0  # consecutive steps skipped so far
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> steps, over the whole run

    def judge(self, config: GuardConfig, loss: float, regime: str, task: str = "") -> str | None:
        """Why a step with this loss must be skipped; None to take it.

        Losses of another `regime` (an objective, a sequence length) are not comparable, nor are
        those of another `task`, where a job has several.
        """
        if regime != self.regime:
            self.losses, self.by_task, self.regime = [], {}, regime
        losses = self._losses(task)
        if not math.isfinite(loss):
            return LOSS
        if config.sigmas is None or len(losses) < config.window:
            return None
        mean, deviation = _moments(losses[-config.window :])
        # Equal losses, as of examples known by heart, have no deviation to compare with.
        return SPIKE if deviation and loss > mean + config.sigmas * deviation else None

    def forget(self) -> None:
        """Forget the losses: those to come are of other data, and compare with none before."""
        self.losses, self.by_task, self.in_a_row = [], {}, 0

    def record_step(self, config: GuardConfig, loss: float, task: str = "") -> None:
        """Record a step that was taken."""
        self.in_a_row = 0
        losses = self._losses(task)
        losses[:] = [*losses, loss][-config.window :]

    def _losses(self, task: str) -> list[float]:
        return self.by_task.setdefault(task, []) if task else self.losses

    def record_skip(self, reason: str) -> None:
        """Record a step that was skipped."""
        self.in_a_row += 1
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def _moments(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation, correctly rounded sums: the same on any machine."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


@dataclass
class RollbackConfig(Section):
    """Roll back once to a checkpoint, and skip some batches.

    Batches are numbered as in ``tandem data dump``. Until a batch is skipped, its number is the
    step's.
    """

    checkpoint: Annotated[int, INDEX, Unit("steps"), "The step of the checkpoint."]
    skip: Annotated[
        list[int] | None,
        INDEX,
        Length(2),
        Ascending(),
        "The first batch to skip, and the batch after the last one to skip; null: skip none.",
    ] = None

    def __str__(self) -> str:
        """The entry in YAML."""
        skip = "null" if self.skip is None else self.skip
        return f"{{checkpoint: {self.checkpoint}, skip: {skip}}}"


def batch_number(step: int, rollbacks: Sequence[RollbackConfig]) -> int:
    """The number of the batch that a 0-based step reads."""
    number = step
    for begin, end in sorted(tuple(entry.skip) for entry in rollbacks if entry.skip):
        if number >= begin:
            number += end - begin
    return number


def first_step(batch: int, rollbacks: Sequence[RollbackConfig]) -> int:
    """The first 0-based step that reads the batch of this number, or a later one."""
    skips = (entry.skip for entry in rollbacks if entry.skip)
    return batch - sum(max(0, min(end, batch) - begin) for begin, end in skips)


def batches_covered(steps: int, rollbacks: Sequence[RollbackConfig]) -> int:
    """How many batches a job of `steps` goes through, those that it skips between them included."""
    return batch_number(steps - 1, rollbacks) + 1


def conflicts_in_order(rollbacks: Sequence[RollbackConfig]) -> Iterator[Refusal]:
    """The entries that skip a batch which their checkpoint, or an earlier entry, has covered."""
    for number, entry in enumerate(rollbacks):
        if entry.skip is None:
            continue
        key, before = f"rollback[{number}].skip", rollbacks[:number]
        if entry.skip[0] < batch_number(entry.checkpoint, before):
            yield (
                key,
                f"the checkpoint of step {entry.checkpoint} has trained on batch {entry.skip[0]} "
                "already; skip later batches, or name an earlier checkpoint",
            )
        if any(e.skip and e.skip[0] < entry.skip[1] and entry.skip[0] < e.skip[1] for e in before):
            yield key, "must not overlap an entry before it"


def proposal(rollbacks: Sequence[RollbackConfig], checkpoint: int, stop: int) -> str:
    """The override that rolls back to `checkpoint`, without what steps from it to `stop` read."""
    skips: list[list[int]] = []  # several ranges, where batches between them are skipped already
    for number in (batch_number(step, rollbacks) for step in range(checkpoint, stop)):
        if skips and skips[-1][1] == number:
            skips[-1][1] += 1
        else:
            skips.append([number, number + 1])
    everything = [*rollbacks, *(RollbackConfig(checkpoint, skip) for skip in skips)]
    return f"rollback={_as_yaml(everything)}"


def recovery_advice(
    rollbacks: Sequence[RollbackConfig], newest: int, sound: int | None, stop: int
) -> str:
    """Advice to the user after a learner has skipped steps up to `stop`; ends with an override.

    `newest` is the step of the newest checkpoint before them, `sound` that of the newest which is
    not suspect. The override skips every batch since `sound`: one of those that were trained on may
    have ruined the weights (PaLM, arXiv 2204.02311, section 5.1).
    """
    if newest and sound is None:
        return (
            f"no checkpoint is sound (the newest is from step {newest}): start a new run with "
            f"a lower learning_rate: 'name=NEW'"
        )
    back = proposal(rollbacks, sound or 0, stop)
    if newest and sound != newest:
        return (
            f"the checkpoint of step {newest} is suspect: its weights were ruined before. Roll "
            f"back to that of step {sound}, with a lower learning_rate if it is high: '{back}'"
        )
    since = f"without the batches since step {sound or 0}"
    return f"start again with a lower learning_rate, or {since}: '{back}'"


def _as_yaml(rollbacks: Iterable[RollbackConfig]) -> str:
    """One line that the command line and a YAML file accept."""
    return f"[{', '.join(map(str, rollbacks))}]"


def applied_state(rollbacks: Sequence[RollbackConfig]) -> list[dict[str, Any]]:
    """The record of these applied entries, for the trainer's state."""
    return [asdict(entry) for entry in rollbacks]


def checkpoint_to_resume(
    newest: Checkpoint | None, rollbacks: Sequence[RollbackConfig]
) -> Checkpoint | None:
    """The `newest` intact checkpoint, or an earlier one that a new entry names. Collective.

    Raises TrainingError where an applied entry was removed or changed, and CheckpointError where
    the checkpoint to roll back to is missing or damaged.
    """
    if newest is None:
        return None
    done = newest.trainer_state["rolled_back"]
    if applied_state(rollbacks)[: len(done)] != done:
        applied = _as_yaml(RollbackConfig(**entry) for entry in done)
        raise TrainingError(
            f"rollback: the run has applied {applied}; keep these entries, and add new ones after"
        )
    target = min((entry.checkpoint for entry in rollbacks[len(done) :]), default=newest.step)
    folder = newest.path.parent
    if target == newest.step or (target > newest.step and target in published(folder)):
        return newest  # the named checkpoint is damaged
    return intact(folder, target, dist.group.WORLD)
