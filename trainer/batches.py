"""Micro-batches on the device, cut from a rank's rows of the global batch.

Shapes: B sequences, L positions, P target positions (examples times slots per example).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline import DEFAULT_VIEW, MASKED, NO_LABEL, Batch, StoredLogits, Target
from data_pipeline.masking.torch_masker import TorchMasker
from model import AttentionMask, Documents, Padded


@dataclass(frozen=True)
class MicroTarget:
    """The labels to predict in a micro-batch.

    For tokens, labels is int64 [P], and positions int64 [P] are flat indices into B * L. For whole
    examples, labels is [examples], int64 or float32, or int64 [examples, M] where an example has
    several, and positions is None. A missing label is -100, or NaN among float32 labels.
    """

    labels: Tensor
    positions: Tensor | None = None


@dataclass(frozen=True)
class MicroLogits:
    """A teacher's stored logits at P masked positions (`data_pipeline.StoredLogits`)."""

    values: Tensor  # float32 [P, k]
    ids: Tensor | None  # int64 [P, k]; None where k is the vocabulary, in its order


@dataclass(frozen=True)
class MicroRuns:
    """`data_pipeline.reading.batches.Runs` as int64 tensors."""

    first: Tensor  # [B, S]
    sizes: Tensor  # [B, S]
    slots: Tensor  # [B, N]


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward pass, and its targets by name.

    `views` are as in `data_pipeline.Batch`; `numbers` too: float64 [examples, K].
    """

    input_ids: Tensor  # [B, L] int64
    segment_ids: Tensor  # [B, L] int64
    attention_mask: Tensor  # [B, L] bool, True where there is a token
    tokens: int  # positions that are no padding; on the host, so no sync is needed
    targets: Mapping[str, MicroTarget]
    views: Mapping[str, MicroBatch] = field(default_factory=dict)
    sequences: int = 1  # sequences per example, which are consecutive among the B
    stored: Mapping[str, MicroLogits] = field(default_factory=dict)  # by the teacher's name
    numbers: Tensor | None = None
    sample_ids: NDArray[np.int64] | None = None  # [examples]; on the host, as are `epochs`
    epochs: NDArray[np.int64] | None = None
    documents: Documents | None = None  # where rows hold several, or attention is causal
    runs: Mapping[str, MicroRuns] = field(default_factory=dict)  # by the view, of aligned spans

    @property
    def visible(self) -> AttentionMask | Padded | None:
        """Which positions attend to which, as models take it: the documents, or the padding.

        None without padding, for faster kernels. Padding follows the tokens, so the number of each
        row's tokens is equivalent to the attention mask.
        """
        if self.documents is not None:
            return self.documents
        is_padded = self.tokens < self.attention_mask.numel()
        return Padded(self.attention_mask.sum(dim=1), self.tokens) if is_padded else None

    @property
    def texts(self) -> Tensor:
        """The number of the text that each position belongs to, [B, L]; 0 at padding.

        It is bool where each row is one text: the attention mask.
        """
        if self.documents is None:
            return self.attention_mask
        return (self.documents.numbers + 1) * self.attention_mask

    @property
    def first_tokens(self) -> tuple[Tensor, Tensor]:
        """The flat positions of texts' first tokens, int64 [N], and which are of texts, bool [N].

        The others are of padding and of empty runs.
        """
        if self.documents is None:
            length = self.input_ids.shape[1]
            firsts = torch.arange(0, self.input_ids.numel(), length, device=self.input_ids.device)
            return firsts, self.attention_mask[:, 0]
        firsts, is_empty = self.documents.firsts, self.documents.boundaries.diff() == 0
        return firsts, self.attention_mask.flatten()[firsts] & ~is_empty

    @property
    def masked_positions(self) -> Tensor | None:
        """The masked positions, int64 [P], as indices into B * L; None in text without masks."""
        return self.targets[MASKED].positions if MASKED in self.targets else None

    def row_labels(self, target: str) -> Tensor:
        """The labels of whole examples; all -100 where this batch has no such target."""
        if target in self.targets:
            return self.targets[target].labels
        return torch.full_like(self.input_ids[:: self.sequences, 0], NO_LABEL)

    def view(self, name: str) -> MicroBatch:
        """The examples as a learner of this view reads them."""
        return self if name == DEFAULT_VIEW else self.views[name]


def to_micro_batches(
    batch: Batch, size: int, device: torch.device, masker: TorchMasker | None = None
) -> Iterator[MicroBatch]:
    """Cut a rank's rows into micro-batches of at most `size`; each is moved when it is needed.

    Where the batch came without masks, `masker` masks the micro-batches on the device.
    """
    for begin in range(0, len(batch.input_ids), size):
        yield to_device(batch.take(slice(begin, begin + size)).trimmed(), device, masker)


def rows_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """The rows of each forward pass: those of similar length, the longest first.

    A pass holds at most `tokens` tokens, padding included, or a single row.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    first = 0
    while first < len(order):
        last = first + max(1, tokens // lengths[order[first]])
        yield order[first:last]
        first = last


def to_device(batch: Batch, device: torch.device, masker: TorchMasker | None = None) -> MicroBatch:
    """All examples of `batch` as one micro-batch."""
    length = batch.input_ids[0].size if len(batch.input_ids) else 0  # positions of an example
    by_sequence = -1, batch.input_ids.shape[-1]  # [examples, C, L] as [examples * C, L]
    input_ids = _move(batch.input_ids.reshape(by_sequence), device)
    masked: dict[str, MicroTarget] = {}
    if batch.to_mask is not None:
        assert masker is not None, "a batch without masks"
        input_ids, masked = _mask(batch, input_ids, masker)
    others = {
        name: _to_target(target, length, device)
        for name, target in batch.targets.items()
        if name not in masked
    }
    return MicroBatch(
        input_ids=input_ids,
        segment_ids=_move(batch.segment_ids.reshape(by_sequence), device),
        attention_mask=_move(batch.attention_mask.reshape(by_sequence), device, torch.bool),
        tokens=int(batch.attention_mask.sum()),
        targets={**masked, **others},
        views={name: to_device(view, device, masker) for name, view in batch.views.items()},
        sequences=1 if batch.input_ids.ndim == 2 else batch.input_ids.shape[1],
        stored={name: _to_stored(target, device) for name, target in batch.stored.items()},
        numbers=None if batch.numbers is None else _move(batch.numbers, device, torch.float64),
        sample_ids=batch.sample_ids,
        epochs=batch.epochs,
        documents=_documents(batch, device),
        runs={
            name: MicroRuns(*(_move(part, device) for part in (run.first, run.sizes, run.slots)))
            for name, run in batch.runs.items()
        },
    )


def _documents(batch: Batch, device: torch.device) -> Documents | None:
    """The documents of rows, where they hold several or attention is causal.

    The host knows their sizes, so that no device is waited for.
    """
    if batch.document_ids is None and not batch.is_causal:
        return None

    def move(tensor: Tensor) -> Tensor:
        return _move(tensor.numpy(), device, tensor.dtype)

    return Documents.of(torch.from_numpy(batch.documents), batch.is_causal).map(move)


def _mask(
    batch: Batch, input_ids: Tensor, masker: TorchMasker
) -> tuple[Tensor, dict[str, MicroTarget]]:
    """The ids with masks applied, and the masked-LM target by name."""
    assert batch.to_mask is not None
    slots, device = batch.targets[MASKED].labels.shape[1], input_ids.device
    masked = masker(
        input_ids,
        _move(batch.epochs, device),
        _move(batch.sample_ids, device),
        _move(batch.to_mask, device),
        slots=slots,
    )
    positions = _flat(masked.positions, input_ids.shape[1])
    return masked.input_ids, {MASKED: MicroTarget(masked.labels.view(-1), positions)}


def _to_target(target: Target, length: int, device: torch.device) -> MicroTarget:
    dtype = torch.float32 if target.labels.dtype.kind == "f" else torch.int64
    labels = _move(target.labels, device, dtype)
    if target.positions is None:
        return MicroTarget(labels)
    return MicroTarget(labels.view(-1), _flat(_move(target.positions, device), length))


def _to_stored(logits: StoredLogits, device: torch.device) -> MicroLogits:
    values = _move(logits.values, device, torch.float32).flatten(0, 1)
    ids = None if logits.ids is None else _move(logits.ids, device).flatten(0, 1)
    return MicroLogits(values, ids)


def _flat(columns: Tensor, length: int) -> Tensor:
    """Columns [B, M] as indices [B * M] into B * L positions."""
    rows = len(columns)
    first_of_row = torch.arange(0, rows * length, length, device=columns.device)[:, None]  # [B, 1]
    return (columns + first_of_row).view(-1)


def _move(array: NDArray[Any], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
