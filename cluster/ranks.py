"""This process's rank and the job's world size, and stop requests by signal.

Three cases: torchrun's variables, which the local launcher sets too; SLURM's under ``srun``; and
neither, which is a job of one process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cluster.errors import LaunchError
from configs.runs import STOPPED

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def hang_up_is_stop() -> bool:
    """Whether SIGHUP counts as a stop request; under nohup it is ignored."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


class StopRequest:
    """Remembers the first SIGTERM, SIGINT or SIGUSR1; a second SIGINT interrupts at once.

    SIGHUP, sent when the terminal closes, is a stop request too, except under nohup. As a context
    manager it restores the previous handlers. The local launcher starts its ranks with these
    signals blocked; the constructor unblocks them. So a signal that arrives during imports is
    neither lost nor fatal.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._interrupts = 0
        numbers = [*STOP_SIGNALS] + [signal.SIGHUP] * hang_up_is_stop()
        self._previous = {number: signal.signal(number, self._receive) for number in numbers}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    @property
    def requested(self) -> bool:
        """Whether a stop has been requested."""
        return self.signal is not None

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal = signal.Signals(number)


# Below Linux's ephemeral ports (32768 and up), so that no client socket takes one first.
FIRST_PORT, PORTS = 16000, 16000
LAST_PORT = 2**16 - 1
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
EXPORTED = (*TORCHRUN, "GROUP_RANK")
PORT = "TANDEM_PORT"  # where the batch script has found that nothing listens
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often torchrun, or our launcher, restarted the ranks
OUTCOME = "TANDEM_OUTCOME"  # the file by which it knows how a command has ended


@dataclass(frozen=True)
class Ranks:
    """One process's rank, globally and on its node, and the rendezvous address."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int

    def __post_init__(self) -> None:
        for name, value, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= value < size:
                raise LaunchError(f"{name} {value} of {size}: check the launcher's variables")
        if self.local_world_size > self.world_size:
            raise LaunchError(
                f"{self.local_world_size} processes on this node, but {self.world_size} in all: "
                "check the launcher's variables"
            )


def derive(env: Mapping[str, str] = os.environ) -> Ranks:
    """This process's ranks from the environment.

    Torchrun's variables take precedence over SLURM's, since torchrun may run under ``srun``.
    Raises LaunchError where the variables are incomplete or contradict each other.
    """
    if "RANK" in env or "WORLD_SIZE" in env:
        return _from_torchrun(env)
    if _in_slurm_step(env):
        return _from_slurm(env)
    return Ranks(0, 1, 0, 1, 0, "127.0.0.1", free_port())


def is_launched(env: Mapping[str, str] = os.environ) -> bool:
    """Whether srun or torchrun started this process, so that it must not launch ranks itself."""
    return "RANK" in env or _in_slurm_step(env)


def export(ranks: Ranks, env: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that torch.distributed and DeepSpeed read."""
    env["RANK"] = str(ranks.rank)
    env["WORLD_SIZE"] = str(ranks.world_size)
    env["LOCAL_RANK"] = str(ranks.local_rank)
    env["LOCAL_WORLD_SIZE"] = str(ranks.local_world_size)
    env["GROUP_RANK"] = str(ranks.node_rank)
    env["MASTER_ADDR"] = ranks.master_addr
    env["MASTER_PORT"] = str(ranks.master_port)


def incarnation(env: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """SLURM's job id (empty without SLURM), and how often the launcher restarted this job."""
    restarts = env.get("SLURM_RESTART_COUNT", env.get(RESTARTS, "0"))
    return env.get("SLURM_JOB_ID", ""), int(restarts)


def reported(code: int, env: Mapping[str, str] = os.environ) -> int:
    """Tell the batch script, if there is one, how this process ends; returns its exit code.

    The script does not learn it from exit codes: srun returns 0 for processes that it has lost,
    too, and SLURM's accounting takes a 75 for a failure, though the process did as it was told.
    """
    file = env.get(OUTCOME)
    if file is None or code not in (0, STOPPED):
        return code
    if env.get("SLURM_PROCID", "0") == "0":
        Path(f"{file}.stopped" if code else file).touch()
    return 0


def free_port() -> int:
    """A TCP port of this machine that is free now; another process may take it at any time."""
    with reserved_port() as port:
        return port


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of this machine that no other launch is given while the block lasts.

    A socket is bound to the port but does not listen. A process that sets SO_REUSEADDR can listen
    on it, as the store of torch.distributed does.
    """
    with socket.socket() as holder:
        while True:
            try:
                holder.bind(("", FIRST_PORT + random.randrange(PORTS)))
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        # Only after the bind: two sockets that both set it before could bind to one port.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield int(holder.getsockname()[1])


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list: ``gpu[07-09,12],cpu1`` is ``gpu07``."""
    head = re.match(r"(?:[^,\[\]]|\[[\d,-]+\])+", node_list)
    if head is None or node_list[head.end() : head.end() + 1] not in ("", ","):
        raise LaunchError(f"cannot read the node list {node_list!r}")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", head.group())


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Tasks of node number `node` in SLURM's compressed form: ``4(x2),3`` means 4, 4, 3."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError(f"cannot read SLURM_STEP_TASKS_PER_NODE={tasks_per_node!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise LaunchError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={tasks_per_node!r}")
    return counts[node]


def job_port(job_id: int, restarts: int) -> int:
    """A port that differs between jobs on a node, and between restarts of one job.

    So a rank of an earlier attempt that is still alive cannot join the new ranks.
    """
    return FIRST_PORT + (job_id * 101 + restarts) % PORTS


def _from_torchrun(env: Mapping[str, str]) -> Ranks:
    missing = [name for name in TORCHRUN if name not in env]
    if missing:
        present = next(name for name in TORCHRUN if name in env)
        raise LaunchError(
            f"{present} is set but {missing[0]} is not: unset it, or set all of {TORCHRUN}"
        )
    if not env["MASTER_ADDR"]:
        raise LaunchError("MASTER_ADDR is empty: set it to the host of rank 0")
    port = _number(env, "MASTER_PORT")
    if not 0 < port <= LAST_PORT:
        raise LaunchError(f"MASTER_PORT={port}: must be a port, 1 to {LAST_PORT}")
    ranks = Ranks(
        rank=_number(env, "RANK"),
        world_size=_number(env, "WORLD_SIZE"),
        local_rank=_number(env, "LOCAL_RANK"),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE"),
        node_rank=_number(env, "GROUP_RANK") if "GROUP_RANK" in env else 0,
        master_addr=env["MASTER_ADDR"],
        master_port=port,
    )
    _refuse_shadowed_slurm(ranks, env)
    return ranks


def _refuse_shadowed_slurm(ranks: Ranks, env: Mapping[str, str]) -> None:
    """Refuse a RANK exported in a batch script: every task of the step would be the same rank."""
    same_job = _in_slurm_step(env) and env.get("SLURM_STEP_NUM_TASKS") == str(ranks.world_size)
    if same_job and ranks.world_size > 1 and env["SLURM_PROCID"] != str(ranks.rank):
        raise LaunchError(
            f"RANK={ranks.rank}, but SLURM_PROCID={env['SLURM_PROCID']}: unset RANK under srun"
        )


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process; a ``--pty`` shell is one task without peers."""
    return "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and "SLURM_PTY_PORT" not in env


def _from_slurm(env: Mapping[str, str]) -> Ranks:
    node = _number(env, "SLURM_NODEID")
    restarts = _number(env, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in env else 0
    return Ranks(
        rank=_number(env, "SLURM_PROCID"),
        world_size=_number(env, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(env, "SLURM_LOCALID"),
        local_world_size=tasks_on_node(_text(env, "SLURM_STEP_TASKS_PER_NODE"), node),
        node_rank=node,
        master_addr=first_host(_text(env, "SLURM_STEP_NODELIST")),
        master_port=_number(env, PORT)
        if PORT in env
        else job_port(_number(env, "SLURM_JOB_ID"), restarts),
    )


def _text(env: Mapping[str, str], name: str) -> str:
    if name not in env:
        raise LaunchError(f"{name} is not set, though SLURM_PROCID is: start the tasks with srun")
    return env[name]


def _number(env: Mapping[str, str], name: str) -> int:
    text = _text(env, name)
    if not re.fullmatch(r"\d{1,18}", text):
        raise LaunchError(f"{name}={text!r} is not a number: check the launcher's variables")
    return int(text)
