"""How much memory the forward and backward passes of a joint step take at their peak.

    python benchmarks/cotraining_memory.py [--rows 8]

The learners of `cotraining_speed.py` run one micro-batch in one process on the CPU. The bytes of
tensors created during the passes are counted operation by operation, without weights, gradients and
optimizer states, which persist.
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cotraining_speed import COUNTS, Cast, forward, learn
from benchmarks.masked_batches import masked_batch
from benchmarks.one_rank import join_alone
from trainer.learners.learner import Learner
from trainer.step import train_step
from trainer.teacher_outputs import detach


class PeakBytes(TorchDispatchMode):
    """The peak of bytes in tensors that are created and alive in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._born: set[int] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        given = {_storage(tensor)._cdata for tensor in tree_leaves((args, kwargs)) if _is(tensor)}
        for tensor in tree_leaves(result):
            if _is(tensor) and _storage(tensor)._cdata not in given | self._born:
                self._count(_storage(tensor))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, name = storage.nbytes(), storage._cdata
        self._born.add(name)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, name, size)

    def _forget(self, name: int, size: int) -> None:
        self._born.discard(name)
        self.live -= size


def _is(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def measure(action: Callable[[], object]) -> int:
    """The peak bytes of `action`, which has run once before to allocate what stays."""
    action()
    with PeakBytes() as bytes_:
        action()
    return bytes_.peak


def main() -> None:
    """Print the peaks of the teacher, of each student and of joint steps, in MB."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    rows = parser.parse_args().rows
    join_alone()
    cast, batch = Cast(rows), masked_batch(rows)
    for learner in [cast.teacher, *cast.students]:
        setattr(learner, "update", lambda *_, **__: None)  # noqa: B010 - gradients stay, as they do between micro-batches
    features = forward(cast.teacher, cast.students, batch)

    def alone(student: Learner) -> int:
        return measure(
            lambda: learn(student, detach(features, cast.teacher.output_projection()), batch)
        )

    students = [alone(student) for student in cast.students]
    print("| students | peak of a joint step | largest of them alone | sum of all alone |")
    print("|---|---|---|---|")
    teacher = 0
    for number in COUNTS:
        joint = measure(partial(train_step, cast.teacher, cast.students[:number], batch, step=0))
        teacher = teacher or joint
        parts = [teacher, *students[:number]]
        print(f"| {number} | {_mb(joint)} | {_mb(max(parts))} | {_mb(sum(parts))} |")


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"


if __name__ == "__main__":
    main()
