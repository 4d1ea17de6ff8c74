"""Finished learners: their files are copied from one checkpoint to the next, without loading."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.checkpoint.manifest import LearnerRecord, TensorRecord, check_file
from trainer.checkpoint.reader import Checkpoint
from trainer.checkpoint.storage import StoredFile, copy_durably


@dataclass(frozen=True)
class Carried:
    """Learners of an earlier checkpoint. Copied, not linked: damage affects one checkpoint only."""

    source: Path = Path()
    files: list[StoredFile] = field(default_factory=list)
    learners: Mapping[str, LearnerRecord] = field(default_factory=dict)  # indices into `files`

    @classmethod
    def of(cls, checkpoint: Checkpoint, names: Collection[str]) -> Carried:
        """The learners `names` of `checkpoint`, which must have them."""
        learners: dict[str, LearnerRecord] = {}
        files: list[StoredFile] = []
        for name in names:
            record, own = checkpoint.stored(name)
            places = {old: len(files) + new for new, old in enumerate(own)}
            learners[name] = _renumbered(record, places)
            files += own.values()
        return cls(checkpoint.path, files, learners)

    @property
    def bytes(self) -> int:
        """Bytes that all ranks copy together."""
        return sum(file.bytes for file in self.files)

    def copy(self, folder: Path, rank: int, ranks: int) -> None:
        """Copy this rank's share into the checkpoint in `folder`, durably, and verify it.

        Raises:
            CheckpointError: a file does not match its checksum.
        """
        for file in self.files[rank::ranks]:
            copy_durably(self.source / file.path, folder / file.path)
            check_file(folder, file)

    def records(self, first_file: int) -> dict[str, LearnerRecord]:
        """The learners' records when `files` start at index `first_file` of the manifest."""
        places = {number: first_file + number for number in range(len(self.files))}
        return {name: _renumbered(record, places) for name, record in self.learners.items()}


def _renumbered(record: LearnerRecord, places: Mapping[int, int]) -> LearnerRecord:
    """The same record with other file indices."""

    def moved(tensor: TensorRecord) -> TensorRecord:
        cuts = [(start, numel, places[file]) for start, numel, file in tensor.fragments]
        return replace(tensor, fragments=cuts)

    return replace(record, tensors={name: moved(one) for name, one in record.tensors.items()})
