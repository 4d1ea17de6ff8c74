"""What a step sends to a GPU: a copy that is not `non_blocking` lets the host wait for the device.

The meta device stands for the GPU: its tensors have no values, but every operator is seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data_pipeline import MASKED
from model.heads import TaskHead
from tests.gpu_kit.counting import caller
from trainer.batches import MicroBatch, MicroTarget
from trainer.objectives.labels import binary_cross_entropy, label_cross_entropy
from trainer.replaced_tokens import replaced
from trainer.tasks import vectors
from trainer.vocabulary_projection import Distribution, TopLogits

GPU = torch.device("meta")
ROWS, LENGTH, SLOTS, CLASSES = 4, 16, 3, 5


class _Uploads(TorchDispatchMode):
    """Notes the lines that copy from the host to the GPU and wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[str] = []

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name, keywords = function.overloadpacket.__name__, kwargs or {}
        if name == "_to_copy" and args[0].device != result.device:
            if not keywords.get("non_blocking", False):
                self.waiting.append(caller())
        elif name in ("index", "index_put_", "index_put"):
            tensors = [index for index in args[1] if index is not None]
            self.waiting += [caller() for index in tensors if index.device != args[0].device]
        return result


def _noted(make: Callable[..., torch.Tensor], waiting: list[str]) -> Callable[..., torch.Tensor]:
    """The function, which notes where it makes a tensor of Python's numbers on the GPU itself."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        if made.device == GPU:
            waiting.append(caller())
        return made

    return call


def class_weights() -> None:
    logits = torch.empty(ROWS, CLASSES, device=GPU)
    labels = torch.empty(ROWS, dtype=torch.int64, device=GPU)
    label_cross_entropy(logits, labels, [1.0] * CLASSES)
    binary_cross_entropy(logits, logits.long(), [1.0] * CLASSES)


def numeric_columns() -> None:
    columns = SimpleNamespace(numbers=["a", "b"], means=[0.0, 1.0], deviations=[1.0, 2.0])
    numbers = torch.empty(ROWS, 2, dtype=torch.float64, device=GPU)
    TaskHead._standardised(SimpleNamespace(head=columns), numbers)  # type: ignore[arg-type]


def samples_of_a_generator() -> None:
    ids = torch.empty(ROWS, LENGTH, dtype=torch.int64, device=GPU)
    slots = torch.empty(ROWS * SLOTS, dtype=torch.int64, device=GPU)
    batch = MicroBatch(
        ids, ids, ids > 0, ROWS * LENGTH, {MASKED: MicroTarget(slots, slots)},
        sample_ids=np.arange(ROWS), epochs=np.zeros(ROWS, np.int64),
    )  # fmt: skip
    logits = TopLogits(torch.empty(ROWS * SLOTS, CLASSES, device=GPU), None, CLASSES)
    replaced(batch, Distribution(logits), seed=1)


def similar_texts() -> None:
    outputs = torch.empty(ROWS, CLASSES, device=GPU)
    labels = torch.empty(ROWS, dtype=torch.int64, device=GPU)
    ids = torch.empty(ROWS, LENGTH, dtype=torch.int64, device=GPU)
    batch = MicroBatch(ids, ids, ids > 0, ROWS * LENGTH, {"vectors": MicroTarget(labels)})
    term = vectors.SimilaritiesTerm(vectors.VectorSimilarities())
    term.head = "vectors"
    term.over_batch([outputs], [batch], [outputs])


@pytest.mark.parametrize(
    "step", [class_weights, numeric_columns, samples_of_a_generator, similar_texts]
)
def test_the_host_never_waits_for_what_it_sends(step, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr(vectors, "over_ranks", lambda rows: rows)
    monkeypatch.setattr(vectors, "against_all", lambda rows, *_: [rows.sum(1), rows, rows])
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    with _Uploads() as uploads:
        for owner, name in ((torch, "tensor"), (torch.Tensor, "new_tensor")):
            monkeypatch.setattr(owner, name, _noted(getattr(owner, name), uploads.waiting))
        step()
    assert not uploads.waiting
