"""The manifest of a folder of stored logits: what they belong to, and its complete shards."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from configs import ConfigError
from configs.rules import COUNT, INDEX, Matches
from configs.section import Refusal, Section
from configs.strict_json import from_json, read_json
from data_pipeline.shards.manifest import FileRecord, fault
from trainer.durable import atomic_write
from trainer.errors import TrainingError

NAME = "manifest.json"
SHARD_NAME = r"shard-\d{9}\.safetensors"
KEY = "teacher.stored.path"  # which begins every message about a folder


@dataclass(frozen=True)
class ShardRecord(Section):
    """One shard: the batches that it holds, and its content."""

    file: Annotated[str, Matches(SHARD_NAME, "the name of a shard")]
    first: Annotated[int, INDEX]  # the number of its first batch
    steps: Annotated[int, COUNT]
    positions: Annotated[int, INDEX]  # masked ones
    bytes: Annotated[int, COUNT]
    sha256: str

    @property
    def end(self) -> int:
        """The number after that of its last batch."""
        return self.first + self.steps


@dataclass(frozen=True)
class Manifest(Section):
    """What a folder holds.

    job: the config of the job that wrote it, as YAML; corpora: as in `data_pipeline.contents`;
    teacher: the checksum of its weights; by_example: whether it holds each example once, in the
    batches of the first epoch. Shards are in the order of their batches, without gaps.
    """

    job: str
    corpora: Mapping[str, str]
    teacher: str
    shards: Sequence[ShardRecord] = ()
    by_example: bool = False

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Raises TrainingError where there is none, or it cannot be read."""
        try:
            tree = read_json(folder / NAME)
            digest = tree.pop("sha256", None) if isinstance(tree, dict) else None
            found = from_json(tree, cls, folder / NAME)
            if digest not in (None, found.digest):
                raise ConfigError("its checksum differs")
            return found
        except FileNotFoundError:
            raise TrainingError(
                f"{KEY}: {folder}: no stored predictions there; write them with `tandem store`"
            ) from None
        except OSError as error:
            raise TrainingError(f"{KEY}: {folder / NAME}: {error.strerror}") from None
        except ConfigError:
            raise TrainingError(
                f"{KEY}: {folder / NAME}: is damaged; name another folder for `tandem store`"
            ) from None

    def save(self, folder: Path) -> None:
        """Replace the manifest in the folder. Raises OSError."""
        content = {**dataclasses.asdict(self), "sha256": self.digest}
        atomic_write(folder / NAME, json.dumps(content, indent=1) + "\n")

    @property
    def digest(self) -> str:
        """The SHA-256 of everything that it says; manifests of older versions have none."""
        content = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def conflicts(self) -> Iterator[Refusal]:
        end = 0
        for number, shard in enumerate(self.shards):
            if shard.first != end:
                yield f"shards[{number}].first", f"must be {end}, not {shard.first}"
            end = shard.end

    @property
    def steps(self) -> int:
        """How many batches it covers, from the first on."""
        return self.shards[-1].end if self.shards else 0

    def holding(self, number: int) -> ShardRecord:
        """The shard that holds the batch of this number, which is covered."""
        return next(one for one in self.shards if number < one.end)

    def with_shard(self, shard: ShardRecord) -> Manifest:
        """The same with one shard more, or in place of the one with its first batch."""
        others = (one for one in self.shards if one.first != shard.first)
        ordered = sorted((*others, shard), key=lambda one: one.first)
        return dataclasses.replace(self, shards=tuple(ordered))

    def missing(self, folder: Path, batches: int) -> Iterator[range]:
        """Those of the first `batches` that are not in the folder, in runs.

        Those of a shard whose file has gone, or has other content, are a run of their own.
        """
        for shard in self.shards:
            if fault(folder / shard.file, FileRecord(shard.bytes, shard.sha256)) is not None:
                yield range(shard.first, shard.end)
        if self.steps < batches:
            yield range(self.steps, batches)


def write_shard(folder: Path, numbers: range, positions: int, data: bytes) -> ShardRecord:
    """Write a shard of these batches atomically; returns its record. Raises OSError."""
    file, digest = f"shard-{numbers.start:09d}.safetensors", hashlib.sha256(data).hexdigest()
    atomic_write(folder / file, data)
    return ShardRecord(file, numbers.start, len(numbers), positions, len(data), digest)
