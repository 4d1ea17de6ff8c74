"""The manifest: the index of a checkpoint's tensors and files, with checksums."""

import errno
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data_pipeline.shards.manifest import sha256
from trainer.checkpoint.folder import MANIFEST, StoredFile
from trainer.checkpoint.snapshot import Fragment, Health, Snapshot, fragment_key
from trainer.errors import CheckpointError, UnreadableCheckpoint

FORMAT = 1


@dataclass(frozen=True)
class TensorRecord:
    """One stored tensor; all its states are cut into the same fragments."""

    shape: list[int]
    group: int
    scalars: dict[str, dict[str, Any]]
    states: dict[str, str]  # state -> dtype
    fragments: list[tuple[int, int, int]]  # (start, elements, index of the file), gapless


@dataclass(frozen=True)
class LearnerRecord:
    """One learner's tensors, by name, and its counters."""

    tensors: dict[str, TensorRecord]
    engine: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except the tensors' values."""

    step: int
    world_size: int
    files: list[StoredFile]
    learners: dict[str, LearnerRecord]
    health: dict[str, Health] = field(default_factory=dict)  # by learner; empty in old manifests
    suspect: str = ""  # why no run should roll back to it; empty if it is sound

    def encode(self) -> bytes:
        """The manifest as JSON, with its own checksum; learners keep their order."""
        content = {"format": FORMAT, **vars(self)}
        return json.dumps({"content": content, "sha256": _digest(content)}, default=vars).encode()


def read_manifest(folder: Path) -> Manifest:
    """Read and verify the manifest of a checkpoint folder.

    Raises:
        CheckpointError: it is missing, damaged, or has another format.
        UnreadableCheckpoint: it cannot be opened, for lack of permission for instance.
    """
    path = folder / MANIFEST
    try:
        signed = json.loads(path.read_bytes())
    except OSError as error:
        raise _fault(path, error) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged (not JSON: {error})") from None
    if not isinstance(signed, dict) or not {"content", "sha256"} <= signed.keys():
        raise CheckpointError(f"{path} is damaged (not the manifest of a checkpoint)")
    content, digest = signed["content"], signed["sha256"]
    if digest != _digest(content):
        raise CheckpointError(f"{path} is damaged (its checksum differs)")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}, this version reads {FORMAT}")
    return _decode(content)


def check_file(folder: Path, file: StoredFile) -> None:
    """Verify a stored file's size and checksum.

    Raises:
        CheckpointError: the file is missing, truncated or changed; names it.
        UnreadableCheckpoint: it cannot be opened.
    """
    path = folder / file.path
    try:
        size = path.stat().st_size
        if size != file.bytes:
            raise CheckpointError(f"{path} is damaged ({size} bytes of {file.bytes})")
        if sha256(path) != file.sha256:
            raise CheckpointError(f"{path} is damaged (its checksum differs)")
    except OSError as error:
        raise _fault(path, error) from None


def _fault(path: Path, error: OSError) -> CheckpointError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO):
        return CheckpointError(f"{path} is damaged ({error.strerror})")
    return UnreadableCheckpoint(
        f"{path} cannot be read ({error.strerror}): it may be intact; make it readable, "
        "and give the command again"
    )


def digest(snapshot: Snapshot) -> str:
    """The digest of what all ranks must agree on: a learner's tensors with their scalars."""
    return _digest(snapshot.tensors)


def merge_learner(
    local: Snapshot, parts: Sequence[tuple[Sequence[Fragment], str]], files: Sequence[int]
) -> LearnerRecord:
    """One learner's record, from rank 0's snapshot and what the ranks have written.

    Each rank sends its fragments, and only a digest of what it knows of the tensors: the tensors
    themselves would be hundreds of megabytes at thousands of ranks.

    Args:
        local: rank 0's snapshot (``data`` is not read).
        parts: of each rank, its fragments and its snapshot's `digest`.
        files: for each rank, the index of its file in the manifest.

    Raises:
        CheckpointError: a rank's tensors differ from those of rank 0.
    """
    wanted = digest(local)
    fragments: dict[str, list[tuple[Fragment, int]]] = {name: [] for name in local.tensors}
    for rank, ((written, described), file) in enumerate(zip(parts, files, strict=True)):
        if described != wanted:
            raise CheckpointError(
                f"rank {rank} has other tensors, or other steps of its optimizer, than rank 0: "
                "the ranks have diverged"
            )
        for fragment in written:
            fragments[fragment.name].append((fragment, file))
    tensors = {}
    for name, about in local.tensors.items():
        states, cuts = _cuts(name, fragments[name], prod(about["shape"]))
        tensors[name] = TensorRecord(about["shape"], about["group"], about["scalars"], states, cuts)
    return LearnerRecord(tensors, local.engine)


def _cuts(
    name: str, fragments: Sequence[tuple[Fragment, int]], total: int
) -> tuple[dict[str, str], list[tuple[int, int, int]]]:
    """The states (with dtype), and the fragments they share; asserts that there are no gaps."""
    states: dict[str, str] = {}
    places: dict[str, list[tuple[int, int, int]]] = {}
    for fragment, file in fragments:
        states[fragment.state] = str(fragment.dtype).removeprefix("torch.")
        places.setdefault(fragment.state, []).append((fragment.start, fragment.numel, file))
    distinct = {tuple(sorted(cuts)) for cuts in places.values()}
    cuts = list(distinct.pop()) if distinct else []
    at = 0
    for start, numel, _ in cuts:
        assert start == at, f"{name}: a gap or an overlap at element {at}"
        at += numel
    assert not distinct, f"{name}: its states are cut at different places"
    assert at == total, f"{name}: {at} of {total} elements stored"
    return states, cuts


def _decode(content: Mapping[str, Any]) -> Manifest:
    learners = {
        name: LearnerRecord(
            {key: TensorRecord(**tensor) for key, tensor in learner["tensors"].items()},
            learner["engine"],
        )
        for name, learner in content["learners"].items()
    }
    files = [StoredFile(**file) for file in content["files"]]
    health = {name: Health(**facts) for name, facts in content.get("health", {}).items()}
    suspect = content.get("suspect", "")
    return Manifest(content["step"], content["world_size"], files, learners, health, suspect)


def _digest(content: Mapping[str, Any]) -> str:
    """The digest of JSON with sorted keys, equal for equal content; a dataclass is an object."""
    ordered = json.dumps(content, sort_keys=True, default=vars)
    return hashlib.sha256(ordered.encode()).hexdigest()


class Fragments:
    """Reads any range of a tensor from the stored fragments."""

    def __init__(self, folder: Path, files: Sequence[StoredFile]) -> None:
        self._folder = folder
        self._files = files
        self._open: dict[int, Any] = {}

    def fill(self, name: str, record: TensorRecord, state: str, start: int, out: Tensor) -> None:
        """Copy the elements ``[start, start + out.numel())`` of a state into ``out`` [numel]."""
        stop, copied = start + out.numel(), 0
        for at, numel, file in record.fragments:
            low, high = max(at, start), min(at + numel, stop)
            if low < high:
                key = fragment_key(name, state, at)
                part = self._file(file).get_slice(key)[low - at : high - at]
                out[low - start : high - start].copy_(part)
                copied += high - low
        assert copied == out.numel(), f"{name} {state}: {copied} of {out.numel()} elements"

    def whole(self, name: str, record: TensorRecord, state: str) -> Tensor:
        """One state of one tensor, flat; floating point tensors are fp32."""
        stored = getattr(torch, record.states[state])
        dtype = torch.float32 if stored.is_floating_point else stored
        out = torch.empty(prod(record.shape), dtype=dtype)
        self.fill(name, record, state, 0, out)
        return out

    def _file(self, index: int) -> Any:
        if index not in self._open:
            path = self._folder / self._files[index].path
            try:
                self._open[index] = safe_open(path, "pt")
            except FileNotFoundError:
                raise CheckpointError(
                    f"{path}: the run has deleted this checkpoint; try again with a newer one"
                ) from None
            except SafetensorError as error:
                raise CheckpointError(f"{path} is damaged ({error})") from None
        return self._open[index]
