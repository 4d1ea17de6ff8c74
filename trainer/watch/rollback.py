"""Going back once to a checkpoint, and passing over some batches: `rollback` in the config.

Which batch a step reads is a pure function of the step and of the config. What has been carried out
is part of the trainer's state, so that a later start does not go back again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from configs.rules import INDEX, Ascending, Doc, Length, Unit
from configs.section import Refusal, Section
from trainer.checkpoint import Checkpoint, published
from trainer.errors import TrainingError


@dataclass
class RollbackConfig(Section):
    """Back to a checkpoint, once, and past some batches.

    Batches are counted as in ``tandem data dump``: the step's number as long as none was skipped.
    """

    checkpoint: Annotated[int, INDEX, Unit("steps"), Doc("The step of the checkpoint.")]
    skip: Annotated[
        list[int] | None,
        INDEX,
        Length(2),
        Ascending(),
        Doc("The first batch that is passed over, and the one after the last; null: only go back."),
    ] = None

    def __str__(self) -> str:
        """As in the YAML."""
        skip = "null" if self.skip is None else self.skip
        return f"{{checkpoint: {self.checkpoint}, skip: {skip}}}"


def batch_number(step: int, rollbacks: Sequence[RollbackConfig]) -> int:
    """The number of the batch that a 0-based step of the job reads."""
    number = step
    for begin, end in sorted(tuple(one.skip) for one in rollbacks if one.skip):
        if number >= begin:
            number += end - begin
    return number


def conflicts_in_order(rollbacks: Sequence[RollbackConfig]) -> Iterator[Refusal]:
    """The entries that pass over batches which their checkpoint, or an earlier entry, has seen."""
    for number, one in enumerate(rollbacks):
        if one.skip is None:
            continue
        key, before = f"rollback[{number}].skip", rollbacks[:number]
        if one.skip[0] < batch_number(one.checkpoint, before):
            yield (
                key,
                f"the checkpoint of step {one.checkpoint} has seen batch {one.skip[0]} already",
            )
        if any(e.skip and e.skip[0] < one.skip[1] and one.skip[0] < e.skip[1] for e in before):
            yield key, "overlaps an entry before it"


def proposal(rollbacks: Sequence[RollbackConfig], checkpoint: int, steps: range) -> str:
    """The override that goes back to a checkpoint and passes over what these steps have read.

    Of these, those that the checkpoint has not seen: somebody may have asked for it among them.
    """
    skips: list[list[int]] = []  # several, where batches between them are passed over already
    for number in (batch_number(step, rollbacks) for step in steps if step >= checkpoint):
        if skips and skips[-1][1] == number:
            skips[-1][1] += 1
        else:
            skips.append([number, number + 1])
    everything = [*rollbacks, *(RollbackConfig(checkpoint, skip) for skip in skips)]
    return f"rollback={_as_yaml(everything)}"


def way_out(
    rollbacks: Sequence[RollbackConfig], newest: int, sound: int | None, steps: range
) -> str:
    """What a user can do about a learner that skipped `steps`, in words that end with an override.

    `newest` is the step of the newest checkpoint, `sound` that of the newest which is not suspect.
    Where they differ, everything since `sound` is passed over: what ruined the weights is in it.
    """
    if newest and sound is None:
        return (
            f"no checkpoint is sound (the newest is that of step {newest}): begin another run, "
            f"with a lower learning_rate: 'name=NEW'"
        )
    if newest and sound != newest:
        back = proposal(rollbacks, sound or 0, range(sound or 0, steps.stop))
        return (
            f"the checkpoint of step {newest} is suspect, its weights were ruined before: go back "
            f"to that of step {sound}, with a lower learning_rate if it is high: '{back}'"
        )
    back = proposal(rollbacks, newest, steps)
    return f"start again with a lower learning_rate, or without these batches: '{back}'"


def _as_yaml(rollbacks: Iterable[RollbackConfig]) -> str:
    """As one line that the command line and a YAML file take."""
    return f"[{', '.join(map(str, rollbacks))}]"


def done_with(rollbacks: Sequence[RollbackConfig]) -> list[dict[str, Any]]:
    """What the trainer's state says once these have been carried out."""
    return [asdict(one) for one in rollbacks]


def checkpoint_to_resume(
    newest: Checkpoint | None, rollbacks: Sequence[RollbackConfig]
) -> Checkpoint | None:
    """The `newest` intact, or an earlier one that a new entry names.

    Raises TrainingError where an entry that was carried out has gone or has changed,
    and CheckpointError where the checkpoint to go back to is missing or damaged.
    """
    if newest is None:
        return None
    done = newest.trainer_state["rolled_back"]
    if done_with(rollbacks)[: len(done)] != done:
        carried_out = _as_yaml(RollbackConfig(**one) for one in done)
        raise TrainingError(
            f"rollback: the run has carried out {carried_out}; leave that in place, and add to it"
        )
    target = min((one.checkpoint for one in rollbacks[len(done) :]), default=newest.step)
    folder = newest.path.parent
    if target == newest.step or (target > newest.step and target in published(folder)):
        return newest  # the one that is named is damaged
    checkpoint = Checkpoint(folder, target)
    checkpoint.verify()
    return checkpoint
