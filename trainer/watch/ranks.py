"""Ranks that fail, hang, differ in their tensors, or wait for what rank 0 does alone.

When one rank ends, the others lose their connection to it and fail too. Under ``srun`` and torchrun
every rank can write to the terminal. So the first rank to fail creates ``attempts/000002.failure``
exclusively, and only that rank prints its error.

A rank that makes no progress is ended, with the stack of each of its threads in its log. The timer
is the kernel's (`setitimer`), and the handler is `faulthandler`'s, in C. It needs neither the GIL
nor a running thread, so it works wherever the rank is stuck. After it has written the stacks, the
signal ends the process, with an exit code other than 0 and 1: the scheduler starts the job again.
Ranks run in lockstep, so one hang stops them all, and each log has its rank's stacks.

A flipped bit or a faulty device changes one rank's replica without an error, and from then on that
rank trains another model. So each rank computes a checksum of its replicated tensors, and the ranks
compare them. At ZeRO stage 0 these are weights and moments; at stages 1 and 2 the weights; at stage
3 the small weights that are never partitioned. Each rank sends one number per learner and kind. A
change of a single bit always changes the checksum.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from configs.kinds import in_plugin
from trainer.checkpoint.attempts import Attempt, Owner
from trainer.checkpoint.layout import FROZEN, layout, torch_optimizer
from trainer.device import SAME_GPU, background_group, same_gpu
from trainer.errors import TrainingError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

T = TypeVar("T")
FAILED = 1
FIRST_EXIT_SECONDS = 3.0
# What gloo says in a RuntimeError when the process at the other end is gone.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
SendHeartbeat = Callable[[], None]


class FirstFailure:
    """The record, shared by the ranks of one attempt, of the rank that failed first."""

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self._path = attempt.record.with_suffix(".failure")
        self._rank = rank
        self._own = False

    def claim(self, error: BaseException) -> bool:
        """Record `error` as the first failure; False if another rank has failed before."""
        content = {"rank": self._rank, "error": str(error), **asdict(Owner.here())}
        try:
            with open(self._path, "x", encoding="utf-8") as file:
                json.dump(content, file, ensure_ascii=False)
        except FileExistsError:
            return False
        except OSError:
            pass  # a full disk, which may be the error itself: better shown twice than never
        self._own = True
        return True

    def wait_for_first(self) -> None:
        """Wait a moment for the first rank that failed, if it is on this machine, to exit.

        A launcher that shows the error of the first rank to exit then shows the right one.
        """
        end = time.monotonic() + FIRST_EXIT_SECONDS
        first = Owner.of(self._path)
        while first and first.is_on_this_machine and first.has_process and time.monotonic() < end:
            time.sleep(0.05)

    def is_elsewhere(self) -> bool:
        """Whether another rank failed first."""
        return not self._own and self._path.exists()


def on_rank_0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0, and return its result on every rank. Collective.

    An exception is raised on rank 0 only; the other ranks exit without a message.
    """
    outcome: list[Any] = [False, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = [True, action()]
        except Exception as error:
            failure = error
    dist.broadcast_object_list(outcome)
    if failure is not None:
        raise failure
    if not outcome[0]:
        raise SystemExit(FAILED)
    return outcome[1]


def explained(error: Exception) -> Exception:
    """The error itself, or one that says what it means. The rank's log has the traceback.

    Another rank has gone or has the same GPU, or a plugin is at fault.
    """
    if isinstance(error, dist.DistBackendError) and SAME_GPU in str(error):
        return same_gpu()
    is_loss = isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in LOST)
    )
    if not is_loss:
        return in_plugin(error) or error
    return TrainingError(
        f"rank {os.environ['RANK']} lost the connection to another rank, which was killed or whose "
        "machine failed; start the job again to resume from its newest checkpoint"
    )


class HangWatch:
    """While it is open, ends the process if `seconds` pass between two calls of `heartbeat`.

    It counts these calls: ``heartbeats``.
    """

    def __init__(self, log: Path, seconds: float) -> None:
        """`log` is the file to append the stacks to. One watch at a time, on the main thread."""
        self._path, self._seconds = log, seconds
        self._log: TextIOWrapper | None = None
        self.heartbeats = 0

    def heartbeat(self) -> None:
        """Report progress. One system call, about a microsecond."""
        self.heartbeats += 1
        if self._log is not None:
            signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __enter__(self) -> HangWatch:
        self._log = self._path.open("a")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, self._log, all_threads=True, chain=True)
        self.heartbeat()
        return self

    def __exit__(self, *exception: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.unregister(signal.SIGALRM)
        assert self._log is not None
        self._log.close()


def run_on_rank_zero(work: Callable[[SendHeartbeat], object], watch: HangWatch) -> None:
    """Call ``work(heartbeat)`` on rank 0, and return on all ranks when it is done. Collective.

    Each call of `heartbeat` resets the `watch` of every rank. The whole work may take any time.
    If rank 0 hangs between two heartbeats, or its machine is gone, the watch of every rank fires.
    """
    # All ranks wait, since a launcher takes a rank that exits early for one that died.
    group = background_group()
    working = torch.ones(1, dtype=torch.int64)

    def heartbeat() -> None:
        watch.heartbeat()
        dist.broadcast(working, 0, group)

    if dist.get_rank() == 0:
        work(heartbeat)
        working.zero_()
        heartbeat()
    else:
        while working:
            heartbeat()
    dist.barrier(group)


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
