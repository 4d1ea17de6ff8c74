"""The folder of stored logits: the section `stored` that asks for it, its manifest and shards.

A shard holds the logits of consecutive batches, in one safetensors file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from configs import ConfigError
from configs.durable import atomic_write
from configs.rules import COUNT, INDEX, NOT_EMPTY, PATH, Matches, OneOf, positive
from configs.section import Refusal, Section
from configs.strict_json import from_json, read_json
from data_pipeline.shards.blocks import offsets
from data_pipeline.shards.manifest import FileRecord, fault
from model import ModelShape
from trainer.errors import TrainingError

VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass
class StoredConfig(Section):
    """A folder with a teacher's predictions at every predicted token, in the order of the job.

    These are the masked tokens of text, and the tokens of a translation.

    `tandem store` writes it; a job with the same teacher and data reads it instead of running the
    teacher. The target is the softmax over the largest logits at the term's temperature. With all
    logits in fp32 it equals the teacher's distribution. With `samples` the target is the share of
    each token among draws from the teacher's distribution; its expectation is that distribution.
    """

    path: Annotated[str, PATH, NOT_EMPTY, "The folder."]
    top_k: Annotated[
        int | None, COUNT, "How many logits of a position are stored; null: all of them."
    ] = 8
    precision: Annotated[
        str, OneOf(*VALUE_BYTES), "The precision in which the logits are stored."
    ] = "fp16"
    samples: Annotated[
        int | None,
        COUNT,
        "Instead of the largest logits, this many tokens are stored, drawn from the "
        "teacher's distribution (arXiv 2503.16870). For losses that are linear in it: soft_kl, "
        "soft_cross_entropy, blended. null: the largest logits.",
    ] = None
    temperature: Annotated[
        float,
        positive(1000.0),
        "The temperature of the distribution from which `samples` are drawn.",
    ] = 1.0

    def conflicts(self) -> Iterator[Refusal]:
        for key in self.changed("top_k", "precision") if self.samples else ():
            yield key, "is for logits, and samples are tokens; remove it, or samples"
        if self.samples is None and [*self.changed("temperature")]:
            yield "temperature", "is for samples; remove it, or set these"

    @property
    def is_cut(self) -> bool:
        """Whether tokens that are drawn from it do not follow the teacher's distribution."""
        return self.temperature != 1.0 if self.samples else self.top_k is not None

    def size(self, vocabulary: int) -> int:
        """How many logits of a position, or drawn tokens, are stored."""
        if self.samples is not None:
            return self.samples
        return vocabulary if self.top_k is None else self.top_k

    def position_bytes(self, vocabulary: int) -> int:
        """The bytes of one masked position: its logits and, unless all are stored, their tokens.

        Of drawn tokens, these alone.
        """
        k = self.size(vocabulary)
        if self.samples is not None:
            return k * id_bytes(vocabulary)
        return k * (VALUE_BYTES[self.precision] + (0 if k == vocabulary else id_bytes(vocabulary)))

    def conflicts_with_teacher(self, teacher: ModelShape, frozen: bool) -> Iterator[Refusal]:
        """A teacher that changes or has no such predictions, and more logits than it has."""
        if not frozen:
            yield "", "is for a frozen teacher; set frozen: true, or remove it"
        if not teacher.mlm_head:
            yield "", "the teacher has no masked-LM head, whose predictions alone are stored"
        if self.samples is None and self.size(teacher.vocab_size) > teacher.vocab_size:
            yield "top_k", f"the vocabulary has {teacher.vocab_size} tokens; null stores all"


def id_bytes(vocabulary: int) -> int:
    """The bytes of the narrowest integer that can name every token."""
    return next(size for size in (1, 2, 4) if vocabulary <= 256**size)


NAME = "manifest.json"
SHARD_NAME = r"shard-\d{9}\.safetensors"
KEY = "teacher.stored.path"  # which begins every message about a folder
# The tensors of a shard: the rows of each batch, and those of `StepLogits` by their names.
ROWS, COUNTS, VALUES, IDS, EXAMPLES = "rows", "counts", "values", "ids", "examples"
VALUE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ID_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}  # by their bytes


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
    """The content of a folder.

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
            manifest = from_json(tree, cls, folder / NAME)
            if digest not in (None, manifest.digest):
                raise ConfigError("its checksum differs")
            return manifest
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
        atomic_write(folder / NAME, json.dumps({**self._content, "sha256": self.digest}) + "\n")

    @property
    def _content(self) -> dict[str, Any]:
        """Plain values. Every new shard writes all others again, so they must be quick."""
        return {**vars(self), "shards": [*map(vars, self.shards)]}

    @property
    def digest(self) -> str:
        """The SHA-256 of everything that it says; manifests of older versions have none."""
        content = json.dumps(self._content, sort_keys=True)
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
        return next(shard for shard in self.shards if number < shard.end)

    def with_shard(self, shard: ShardRecord) -> Manifest:
        """This manifest with one shard more, or in place of the one with its first batch."""
        others = (other for other in self.shards if other.first != shard.first)
        ordered = sorted((*others, shard), key=lambda other: other.first)
        return dataclasses.replace(self, shards=tuple(ordered))

    def missing(self, folder: Path, batches: int) -> Iterator[range]:
        """The numbers below `batches` of batches that are not in the folder, in runs.

        The batches of a shard whose file has gone, or has other content, are a run of their own.
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


@dataclass(frozen=True)
class StepLogits:
    """Stored predictions of R consecutive rows of one batch, with N masked positions in all.

    counts: int32 [R], the positions of each row; values: [N, k]; ids: [N, k] the tokens, largest
    logit first; None where values has the whole vocabulary, in its order. Of drawn tokens, ids are
    these, ascending, and values None. examples: int64 [R], the numbers of the rows' examples; None
    where rows are found by their batch.
    """

    counts: Tensor
    values: Tensor | None = None
    ids: Tensor | None = None
    examples: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that there are, by their names."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    @classmethod
    def joined(cls, parts: Sequence[StepLogits]) -> StepLogits:
        """The rows of all parts, in this order."""
        names = parts[0].tensors
        return cls(**{name: torch.cat([part.tensors[name] for part in parts]) for name in names})

    def of_examples(self, numbers: Tensor, kept: Tensor) -> StepLogits:
        """The rows where `kept` [R] is true, of the examples with these numbers [R]."""
        positions = kept.repeat_interleave(self.counts)
        values = None if self.values is None else self.values[positions]
        ids = None if self.ids is None else self.ids[positions]
        return StepLogits(self.counts[kept], values, ids, numbers[kept])

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def encode(steps: Sequence[StepLogits]) -> bytes:
    """The content of a shard of these batches."""
    rows = torch.tensor([len(step.counts) for step in steps], dtype=torch.int32)
    return safetensors.torch.save({ROWS: rows, **StepLogits.joined(steps).tensors})


def decode(content: bytes) -> StepLogits:
    """All rows of a shard's content, as if of one batch."""
    tensors = safetensors.torch.load(content)
    del tensors[ROWS]
    return StepLogits(**tensors)


class Shard:
    """Reads parts of a shard's batches; the file is mapped, not loaded."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, "pt")
        self._names = list(self._file.keys())
        self._ends = self._file.get_tensor(ROWS).cumsum(0).tolist()
        self._counts = self._file.get_tensor(COUNTS)
        self._positions = offsets(self._counts.numpy())  # before each row

    def step(self, number: int, rank: int, world_size: int) -> StepLogits:
        """A rank's rows of the shard's batch of this number, from 0."""
        begin, end = (0, *self._ends)[number], self._ends[number]
        share = (end - begin) // world_size
        return self._rows_in(slice(begin + rank * share, begin + (rank + 1) * share))

    def examples(self) -> NDArray[np.int64]:
        """The number of each row's example; none where rows are found by their batch."""
        return (
            self._file.get_tensor(EXAMPLES).numpy()
            if EXAMPLES in self._names
            else np.zeros(0, np.int64)
        )

    def row(self, row: int) -> StepLogits:
        """The row of this number, from 0, whichever its batch."""
        return self._rows_in(slice(row, row + 1))

    def _rows_in(self, rows: slice) -> StepLogits:
        at = slice(int(self._positions[rows.start]), int(self._positions[rows.stop]))
        values, ids = (
            self._file.get_slice(name)[at] if name in self._names else None
            for name in (VALUES, IDS)
        )
        return StepLogits(self._counts[rows], values, ids)
