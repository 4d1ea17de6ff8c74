"""Losses over the vocabulary beside the plain formulas, and beside Liger's kernels on a GPU.

Forward and backward of the projection with its loss: cross-entropy, and the KL divergence from a
teacher's distribution. On CUDA in bfloat16, with the peak of allocated memory, and with
``liger_kernel`` where it is installed; on a CPU in float32. The competitors take turns; medians.

    python benchmarks/model_vocabulary_loss.py --positions 608

Liger's loss of a distribution is its generalised Jensen-Shannon divergence at beta 0, which is the
KL divergence; it knows no biases and no weights of positions.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.masked_batches import VOCABULARY
from benchmarks.turns import seconds_of, take_turns, wall_clock
from tests.model.chunked import chunked_cross_entropy
from trainer.objectives.vocabulary import chunked_kl_divergence

try:
    from liger_kernel.transformers.functional import (
        liger_fused_linear_cross_entropy,
        liger_fused_linear_jsd,
    )
except ImportError:
    liger_fused_linear_cross_entropy = liger_fused_linear_jsd = None

STUDENT_WIDTH, TEACHER_WIDTH = 312, 768

Loss = Callable[[], Tensor]


def main() -> None:
    """Print milliseconds of forward and backward, and peak MiB on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=608)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for title, losses in (
        ("cross-entropy", _cross_entropies(arguments.positions, device)),
        ("KL divergence", _divergences(arguments.positions, device)),
    ):
        arms = {name: partial(_measured, loss, device) for name, loss in losses.items()}
        for name, found in take_turns(arms, arguments.turns).items():
            seconds, peak = statistics.median(one for one, _ in found), found[-1][1]
            memory = f", {peak / 2**20:.0f} MiB" if device.type == "cuda" else ""
            print(f"{title}, {name}: {1000 * seconds:.1f} ms{memory}")


def _tensors(positions: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The projection's input [P, E] and its weight [V, E]."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(positions, width, generator=generator)
    weight = 0.02 * torch.randn(VOCABULARY, width, generator=generator)
    return x.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_()


def _cross_entropies(positions: int, device: torch.device) -> dict[str, Loss]:
    x, weight = _tensors(positions, TEACHER_WIDTH, device)
    labels = torch.randint(0, VOCABULARY, (positions,), generator=torch.Generator().manual_seed(0))
    labels = labels.to(device)
    losses: dict[str, Loss] = {
        "plain": lambda: F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum"),
        "tandem": lambda: chunked_cross_entropy(x, weight, None, labels)[0],
    }
    if device.type == "cuda" and liger_fused_linear_cross_entropy is not None:
        losses["liger"] = lambda: liger_fused_linear_cross_entropy(
            x, weight, labels, reduction="sum"
        )
    return {name: _with_backward(loss, (x, weight)) for name, loss in losses.items()}


def _divergences(positions: int, device: torch.device) -> dict[str, Loss]:
    x, weight = _tensors(positions, STUDENT_WIDTH, device)
    theirs, their_weight = (one.detach() for one in _tensors(positions, TEACHER_WIDTH, device))

    def plain() -> Tensor:
        log_q = F.linear(x, weight).float().log_softmax(-1)
        log_p = F.linear(theirs, their_weight).float().log_softmax(-1)
        return F.kl_div(log_q, log_p, reduction="sum", log_target=True)

    decoders = (weight, None), (their_weight, None)
    losses: dict[str, Loss] = {
        "plain": plain,
        "tandem": lambda: chunked_kl_divergence(x, decoders[0], theirs, decoders[1])[0],
    }
    if device.type == "cuda" and liger_fused_linear_jsd is not None:
        losses["liger"] = lambda: liger_fused_linear_jsd(
            x, weight, theirs, their_weight, jsd_beta=0.0
        )
    return {name: _with_backward(loss, (x, weight)) for name, loss in losses.items()}


def _with_backward(loss: Loss, inputs: tuple[Tensor, ...]) -> Loss:
    def both() -> Tensor:
        value = loss()
        torch.autograd.grad(value, inputs)
        return value

    return both


def _measured(loss: Loss, device: torch.device) -> tuple[float, int]:
    """The seconds of `loss`, and the bytes allocated at the peak beyond those before."""
    before = _allocated(device)
    seconds = seconds_of(loss, wall_clock)
    return seconds, _allocated(device, peak=True) - before


def _allocated(device: torch.device, peak: bool = False) -> int:
    """Allocated bytes, now or at the peak since the last call; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    found = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return int(found)


if __name__ == "__main__":
    main()
