"""Check that replicated tensors are equal on all ranks.

A flipped bit or a faulty device changes one rank's replica without an error, and from then on that
rank trains another model. So each rank computes a checksum of its replicated tensors, and the ranks
compare them. At ZeRO stage 0 these are weights and moments; at stages 1 and 2 the weights; at stage
3 the small weights that are never partitioned. Each rank sends one number per learner and kind. A
change of a single bit always changes the checksum.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.layout import FROZEN, layout, torch_optimizer
from trainer.errors import TrainingError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

KINDS = ("weights", "optimizer state")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd, so that swapped tensors change the sum


class DivergenceError(TrainingError):
    """The ranks' replicas of a learner differ: one rank computed or stored a wrong value."""


def verify(engines: Mapping[str, DeepSpeedEngine], step: int) -> None:
    """Compare the replicated tensors of all ranks after `step` steps. Collective.

    Raises:
        DivergenceError: on every rank; names the learner and the ranks in the minority.
    """
    if dist.get_world_size() == 1:
        return
    local = torch.stack([torch.stack(checksums(engine)) for engine in engines.values()])
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    sums = torch.stack(gathered).tolist()  # [ranks][learners][kinds]
    for number, name in enumerate(engines):
        for kind, what in enumerate(KINDS):
            differing = minority([rank[number][kind] for rank in sums])
            if differing:
                raise DivergenceError(_message(name, what, differing, step))


@torch.no_grad()
def checksums(engine: DeepSpeedEngine) -> tuple[Tensor, Tensor]:
    """Checksums of weights and of optimizer states: int64 scalars on the engine's device."""
    return _sum(_weights(engine), engine.device), _sum(_states(engine), engine.device)


def minority(sums: Sequence[int]) -> list[int]:
    """The ranks whose sum differs from the majority's; every rank where there is no majority."""
    (common, votes), *others = Counter(sums).most_common()
    if not others:
        return []
    if 2 * votes <= len(sums):
        return list(range(len(sums)))
    return [rank for rank, value in enumerate(sums) if value != common]


def _message(learner: str, what: str, ranks: Sequence[int], step: int) -> str:
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    named = " and ".join(f"{rank} on {hosts[rank]}" for rank in ranks)
    subject = (
        f"the {what} of rank {named} differ from those of the other ranks"
        if 2 * len(ranks) < len(hosts)
        else f"the {what} of ranks {named} differ"
    )
    return (
        f"step {step}: {learner}: {subject}, although they must be equal: memory or a device there "
        "is faulty; start again without that machine, to resume from the newest checkpoint"
    )


def _weights(engine: DeepSpeedEngine) -> Iterator[Tensor]:
    """Unpartitioned parameters and buffers, and their replicated fp32 master weights."""
    for parameter in engine.module.parameters():
        if not hasattr(parameter, "ds_persist") or parameter.ds_persist:
            yield parameter.data
    yield from engine.module.buffers()
    seen = {parameter.data_ptr() for parameter in engine.module.parameters()}
    for piece in layout(engine):
        if piece.replicated and piece.group != FROZEN and piece.holder.data_ptr() not in seen:
            seen.add(piece.holder.data_ptr())
            yield piece.holder.data


def _states(engine: DeepSpeedEngine) -> Iterator[Tensor]:
    optimizer = torch_optimizer(engine)
    if optimizer is None:
        return
    holders = {id(piece.holder): piece.holder for piece in layout(engine) if piece.replicated}
    for holder in holders.values():
        for value in optimizer.state.get(holder, {}).values():
            if torch.is_tensor(value):
                yield value


def _sum(tensors: Iterator[Tensor], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        bits = tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
        total = total * _FACTOR + bits.sum(dtype=torch.int64).to(device)
    return total
