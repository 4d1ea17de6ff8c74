"""Finding, verifying and reading checkpoints, and loading a learner with any partitioning."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint import layout
from trainer.checkpoint.attempts import published
from trainer.checkpoint.folder import (
    METRICS,
    TRAINER,
    Ranking,
    StoredFile,
    all_steps,
    read_trainer_file,
    scores_by_step,
    scores_of,
    step_name,
)
from trainer.checkpoint.layout import Piece
from trainer.checkpoint.manifest import (
    Fragments,
    LearnerRecord,
    Manifest,
    TensorRecord,
    check_file,
    read_manifest,
)
from trainer.checkpoint.snapshot import AVERAGE, MASTER, Health
from trainer.errors import CheckpointError, UnreadableCheckpoint

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@torch.no_grad()
def restore(
    engine: DeepSpeedEngine, saved: LearnerRecord, source: Fragments, has_average: bool = True
) -> None:
    """Overwrite a freshly initialised engine with a stored learner; collective.

    has_average: whether the learner has averaged weights, and so reads those that are stored.

    Raises:
        CheckpointError: the engine's parameters differ; nothing has been overwritten.
    """
    pieces = layout.layout(engine)
    optimizer = layout.torch_optimizer(engine)
    holders = _by_holder(pieces)
    _check_same_parameters(pieces, saved.tensors)
    resumed = [_resumed(held, optimizer, saved.tensors, has_average) for held in holders]
    for piece in pieces:
        if piece.group == layout.FROZEN:
            fill_piece(piece, MASTER, piece.of(piece.holder), saved.tensors, source)
    for held, record in zip(holders, resumed, strict=True):
        _restore_holder(held, record, optimizer, saved.tensors, source)
    layout.refresh(engine)
    layout.restore_loss_scale(engine, saved.engine["loss_scale"])
    layout.restore_counters(engine, saved.engine)


def _by_holder(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The optimized pieces, grouped by flat tensor."""
    holders: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.group != layout.FROZEN:
            holders.setdefault(id(piece.holder), []).append(piece)
    return list(holders.values())


def _check_same_parameters(pieces: Sequence[Piece], saved: Mapping[str, TensorRecord]) -> None:
    here = {piece.name: piece for piece in pieces}
    for name in sorted(here.keys() | saved.keys()):
        if name not in saved:
            raise CheckpointError(f"the model's {name} is not in the checkpoint")
        if name not in here:
            raise CheckpointError(f"the checkpoint's {name} is not in the model")
        piece, record = here[name], saved[name]
        if list(piece.shape) != record.shape:
            raise CheckpointError(
                f"{name} has shape {list(piece.shape)} in the model and {record.shape} stored"
            )
        if record.group == layout.FROZEN and piece.group != layout.FROZEN:
            raise CheckpointError(f"{name} is trained, but frozen in the checkpoint")


def _resumed(
    held: Sequence[Piece],
    optimizer: torch.optim.Optimizer | None,
    saved: Mapping[str, TensorRecord],
    has_average: bool,
) -> TensorRecord:
    """The states with which a flat tensor resumes: equal for all parameters in it.

    All of them begin anew where one of them has states of another optimizer.
    """
    assert optimizer is not None
    names = optimizer.param_groups[held[0].group].get("states")
    stored = [saved[piece.name] for piece in held]
    if any(_optimizer_states(record) and not _are_kept(record, names) for record in stored):
        names = ()
    first, *others = (resumed_states(record, names, has_average) for record in stored)
    for piece, record in zip(held[1:], others, strict=True):
        # The scalars (its step) are those of the whole tensor.
        if record.scalars != first.scalars or record.states.keys() != first.states.keys():
            raise CheckpointError(
                f"{piece.name} and {held[0].name} have made different numbers of optimizer steps, "
                "so they cannot share a ZeRO partition; resume with zero_stage: 0"
            )
    return first


def _restore_holder(
    held: Sequence[Piece],
    resumed: TensorRecord,
    optimizer: torch.optim.Optimizer | None,
    saved: Mapping[str, TensorRecord],
    source: Fragments,
) -> None:
    assert optimizer is not None
    holder, settings = held[0].holder, optimizer.param_groups[held[0].group]
    # Padding may be uninitialised memory (stage 3), which would corrupt norms.
    holder.data.zero_()
    device = _scalar_device(settings, holder)
    # Every holder needs its own scalars: torch increments `step` in place.
    state = {key: layout.decode_scalar(value, device) for key, value in resumed.scalars.items()}
    for key, dtype in resumed.states.items():
        if key != MASTER:
            state[key] = torch.zeros_like(holder, dtype=getattr(torch, dtype), requires_grad=False)
    for piece in held:
        for key in resumed.states:
            out = piece.of(holder if key == MASTER else state[key])
            fill_piece(piece, key, out, saved, source)
    optimizer.state[holder] = state


def resumed_states(
    saved: TensorRecord, names: Sequence[str] | None, has_average: bool = True
) -> TensorRecord:
    """The stored states with which an optimizer of states with these `names` resumes; None: all.

    If it keeps others, as in a run that resumes with another kind of optimizer, they begin anew.
    """
    is_same = _are_kept(saved, names)
    left_out = set() if is_same else _optimizer_states(saved)
    if not has_average:
        left_out = left_out | {AVERAGE}
    states = {key: dtype for key, dtype in saved.states.items() if key not in left_out}
    return replace(saved, states=states, scalars=saved.scalars if is_same else {})


def _are_kept(saved: TensorRecord, names: Sequence[str] | None) -> bool:
    stored = _optimizer_states(saved)
    return names is None or {*names} in (stored, stored | saved.scalars.keys() - {"step"})


def _optimizer_states(saved: TensorRecord) -> set[str]:
    return saved.states.keys() - {MASTER, AVERAGE}


def fill_piece(
    piece: Piece, state: str, out: Tensor, saved: Mapping[str, TensorRecord], source: Fragments
) -> None:
    """Read a piece of one state into `out` [numel]; what every rank holds whole, rank 0 reads.

    Collective.
    """
    if not piece.replicated or dist.get_rank() == 0:
        source.fill(piece.name, saved[piece.name], state, piece.start, out)
    if piece.replicated:
        dist.broadcast(out, 0)


def _scalar_device(settings: Mapping[str, Any], holder: Tensor) -> torch.device:
    """Where torch expects `step`: beside the parameter if fused or capturable, else the CPU."""
    on_device = settings.get("fused") or settings.get("capturable")
    return holder.device if on_device else torch.device("cpu")


def missing(folder: Path, step: int, available: Sequence[int]) -> CheckpointError:
    """The error for a step without a checkpoint in ``RUN/checkpoints``, which has `available`."""
    if step in available:  # it was published, or removed, a moment ago
        return CheckpointError(f"{folder}: the checkpoint of step {step} is not there; try again")
    if step in all_steps(folder):
        return CheckpointError(
            f"{folder}: the checkpoint of step {step} is no longer valid, since the run rolled "
            f"back to one before it; there are: {_listed(available)}"
        )
    return CheckpointError(
        f"{folder}: no checkpoint of step {step}; there are: {_listed(available)}"
    )


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


class Checkpoint:
    """A published checkpoint. Opening it reads the manifest, not the tensors."""

    def __init__(self, folder: Path, step: int) -> None:
        """Open ``folder/step-…``.

        Raises:
            CheckpointError: there is no checkpoint of this step, or its manifest is damaged.
        """
        self.step = step
        self.path = folder / step_name(step)
        if not self.path.is_dir():
            raise missing(folder, step, published(folder))
        self._manifest = read_manifest(self.path)
        self.trainer_state: dict[str, Any] = read_trainer_file(folder, step).get("state", {})

    @property
    def learners(self) -> list[str]:
        """The learners in the checkpoint: "teacher", "students/NAME"."""
        return list(self._manifest.learners)

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Read every ``parts``-th file and compare its checksum.

        Raises:
            CheckpointError: names the first file that is missing, truncated or changed.
        """
        for file in self._manifest.files[part::parts]:
            check_file(self.path, file)

    def verify_state(self) -> None:
        """Verify the file of the trainer's own state only."""
        for file in self._manifest.files:
            if file.path == TRAINER:
                check_file(self.path, file)

    @property
    def suspect(self) -> str:
        """Why no run should roll back to this checkpoint; empty if it is sound."""
        return self._manifest.suspect

    @property
    def health(self) -> Mapping[str, Health]:
        """The health of each learner."""
        return self._manifest.health

    def scores_by(self, rankings: Iterable[Ranking]) -> dict[str, float]:
        """The learners' scores of its step, by which these `rankings` rank it."""
        stored = scores_of(self.path.parent, self.step)
        scores = {ranking.learner: ranking.score(stored) for ranking in rankings}
        return {learner: score for learner, score in scores.items() if score is not None}

    @property
    def metrics(self) -> bytes:
        """The newest rows of the run's metrics when it was saved; empty in old checkpoints."""
        file = self.path / METRICS
        return file.read_bytes() if file.exists() else b""

    def load(self, learner: str, engine: DeepSpeedEngine, has_average: bool = True) -> None:
        """Load a learner's weights, optimizer state and counters into a fresh engine; collective.

        The engine may have any number of ranks, any ZeRO stage and any precision. It keeps its own
        parameter groups and their settings (weight decay, betas), which are configuration. An
        engine without an optimizer loads only the weights. Averaged weights are loaded if the
        learner `has_average`.

        Raises:
            CheckpointError: the parameters differ; nothing has been overwritten.
        """
        try:
            restore(engine, self._record(learner), self._fragments(), has_average)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {learner}: {error}") from None

    def fits(self, learner: str, shapes: Mapping[str, list[int]]) -> bool:
        """Whether it has this learner, with tensors of these shapes."""
        if learner not in self.learners:
            return False
        tensors = self._record(learner).tensors
        return all(name in tensors and tensors[name].shape == shapes[name] for name in shapes)

    def weights_of(self, learner: str) -> Callable[[Piece], Tensor]:
        """Reads pieces of a learner's weights, [numel], where their holders are; collective."""
        record, fragments = self._record(learner), self._fragments()

        def read(piece: Piece) -> Tensor:
            out = torch.empty_like(piece.of(piece.holder))
            fill_piece(piece, MASTER, out, record.tensors, fragments)
            return out

        return read

    def is_frozen(self, learner: str) -> bool:
        """Whether no optimizer owned any of the learner's parameters when it was saved."""
        groups = {tensor.group for tensor in self._record(learner).tensors.values()}
        return groups == {layout.FROZEN}

    def has_state(self, learner: str, state: str) -> bool:
        """Whether a parameter of the learner has this optimizer state."""
        return any(state in tensor.states for tensor in self._record(learner).tensors.values())

    def master_weights(self, learner: str, state: str = MASTER) -> dict[str, Tensor]:
        """A learner's parameters and persistent buffers, by the module's names, on the CPU.

        Floating point tensors are the fp32 master weights, or the `state` of those that have it;
        other tensors keep their dtype.
        """
        fragments = self._fragments()

        def values(name: str, tensor: TensorRecord) -> Tensor:
            stored = state if state in tensor.states else MASTER
            return fragments.whole(name, tensor, stored).reshape(tensor.shape)

        tensors = self._record(learner).tensors
        return {name: values(name, tensor) for name, tensor in tensors.items()}

    def stored(self, learner: str) -> tuple[LearnerRecord, dict[int, StoredFile]]:
        """A learner's record, and the files that it refers to, by index."""
        record = self._record(learner)
        used = {file for tensor in record.tensors.values() for _, _, file in tensor.fragments}
        return record, {index: self._manifest.files[index] for index in sorted(used)}

    def _fragments(self) -> Fragments:
        return Fragments(self.path, self._manifest.files)

    def _record(self, learner: str) -> LearnerRecord:
        if learner not in self._manifest.learners:
            raise CheckpointError(
                f"{self.path} has no learner {learner!r}, only {', '.join(self.learners)}"
            )
        return self._manifest.learners[learner]


def newest_intact(
    folder: Path, report: Callable[[str], None], group: dist.ProcessGroup | None = None
) -> Checkpoint | None:
    """The newest checkpoint in which every file matches its checksum; None if there is none.

    If a checkpoint is damaged, the damaged file is reported and the checkpoint before it is tried.
    With a process group this is collective: the ranks share the reading, and rank 0 reports.

    Raises:
        CheckpointError: all checkpoints are damaged. The user decides whether to restore one.
        UnreadableCheckpoint: a file cannot be opened; an older checkpoint would lose what it holds.
    """
    rank = 0 if group is None else dist.get_rank(group)
    steps: list[Any] = [published(folder) if rank == 0 else None]
    if group is not None:
        dist.broadcast_object_list(steps, group=group, group_src=0)
    for step in reversed(steps[0]):
        damages = _damages(folder, step, group)
        if not damages:
            return Checkpoint(folder, step)
        if group is None and not (folder / step_name(step)).exists():
            return newest_intact(folder, report)  # a live run has just deleted it
        for damage in damages:
            if isinstance(damage, UnreadableCheckpoint):
                raise damage
        if step == steps[0][0]:
            raise CheckpointError(
                f"{damages[0]}, and there is no intact checkpoint before it: restore one, or "
                f"remove {folder} to start from step 0"
            )
        if rank == 0:
            report(f"{damages[0]}: using the checkpoint before step {step}")
    return None


def best_intact(folder: Path, ranking: Ranking, report: Callable[[str], None]) -> Checkpoint | None:
    """The intact, sound checkpoint that ranks first; None if none has a score.

    A damaged one is reported, and the next best is tried. Raises UnreadableCheckpoint for one that
    cannot be opened.
    """
    for step in ranking.ranked(scores_by_step(folder, published(folder))):
        try:
            checkpoint = intact(folder, step)
        except UnreadableCheckpoint:
            raise
        except CheckpointError as error:
            report(f"{error}: using the next best checkpoint of {ranking.learner}")
            continue
        if not checkpoint.suspect:
            return checkpoint
    return None


def newest_sound(folder: Path, before: float = math.inf) -> Manifest | None:
    """The newest manifest, of a step below `before`, that is not suspect; None if there is none.

    Only manifests are read; damaged ones are ignored.
    """
    for step in reversed(published(folder)):
        if step < before:
            with contextlib.suppress(CheckpointError):
                manifest = read_manifest(folder / step_name(step))
                if not manifest.suspect:
                    return manifest
    return None


def newest_state(folder: Path) -> dict[str, Any] | None:
    """The newest intact trainer state in any checkpoint; None if there is none.

    Tensors are not read.
    """
    for step in reversed(published(folder)):
        try:
            checkpoint = Checkpoint(folder, step)
            checkpoint.verify_state()
        except CheckpointError:
            continue
        return checkpoint.trainer_state
    return None


def intact(folder: Path, step: int, group: dist.ProcessGroup | None = None) -> Checkpoint:
    """The checkpoint of a step, every file of which matches its checksum.

    With a process group this is collective, and the ranks share the reading. Raises
    CheckpointError, on every rank, for one that is missing or damaged.
    """
    for damage in _damages(folder, step, group):
        raise damage
    return Checkpoint(folder, step)


def _damages(folder: Path, step: int, group: dist.ProcessGroup | None) -> list[CheckpointError]:
    """The first damage that each rank finds in a checkpoint."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    damages: list[CheckpointError | None] = [_damage(folder, step, rank, size)]
    if group is not None:
        damages *= size
        dist.all_gather_object(damages, damages[rank], group=group)
    return [damage for damage in damages if damage]


def _damage(folder: Path, step: int, part: int, parts: int) -> CheckpointError | None:
    try:
        Checkpoint(folder, step).verify(part, parts)
    except CheckpointError as error:
        return error
    return None
