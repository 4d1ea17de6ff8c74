"""Run a test's function on several gloo ranks, each in a process of its own, on the CPU.

``results = run_distributed(fn, 2, *args)`` calls ``fn(*args)`` on every rank, in a process group
that is already initialised, and returns the ranks' results in order. ``fn`` must be importable (a
module level function); arguments and results must pickle.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.ranks import reserved_port
from tests.fork_server import Forked, server

TIME_LIMIT = 300.0  # seconds; a hang then shows every rank's stack


class RankFailed(AssertionError):
    """One rank raised, was killed, or did not end in time; carries that rank's traceback."""


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, time_limit: float = TIME_LIMIT
) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` gloo ranks and return their results, rank 0 first.

    Raises:
        RankFailed: as soon as one rank fails; the others are killed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name, reserved_port() as port:
        folder = Path(name)
        ranks = [
            server().start(_rank, rank, world_size, port, folder, fn, args, time_limit)
            for rank in range(world_size)
        ]
        try:
            _wait_for(ranks, time_limit + 10)
        except RankFailed as failed:
            raise RankFailed(f"{fn.__name__}: {failed}\n{_first_error(folder)}") from None
        finally:
            for rank in ranks:
                rank.kill()
        return [_result(folder, rank) for rank in range(world_size)]


def _wait_for(ranks: Sequence[Forked], seconds: float) -> None:
    end = time.monotonic() + seconds
    while None in (codes := [rank.wait(0.02) for rank in ranks]) or any(codes):
        if any(codes):  # the others may fail because one was killed, and be noticed before it
            found = {rank.wait(0.5) or 0: number for number, rank in enumerate(ranks)}
            code = min(found) or max(found)
            raise RankFailed(f"rank {found[code]} {_ended(code)}")
        if time.monotonic() > end:
            raise RankFailed(f"no end within {seconds:.0f} s")


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def set_rank_environment(rank: int, world_size: int, port: int) -> None:
    """Set what DeepSpeed and torch read to find their place. LOCAL_RANK avoids mpi4py."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        DS_ACCELERATOR="cpu",
        CUDA_VISIBLE_DEVICES="",
    )


def _rank(
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    time_limit: float,
) -> None:
    faulthandler.dump_traceback_later(time_limit, exit=True)
    import torch
    import torch.distributed as dist

    set_rank_environment(rank, world_size, port)
    torch.set_num_threads(1)
    # DeepSpeed calls names that torch has deprecated, at every collective.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        _skip_shared_memory_build()
        result = fn(*args)
        (folder / f"rank-{rank}.result").write_bytes(pickle.dumps(result))
        dist.barrier()  # nobody leaves, closing its sockets, while another still works
    except BaseException:
        _fail(folder, rank)
    _leave(0)


def _skip_shared_memory_build() -> None:
    """DeepSpeed would compile an operator that gloo has no use for (25 s, needs a compiler)."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _fail(folder: Path, rank: int) -> None:
    """Write this rank's traceback and exit at once, before connection errors of the others."""
    text = f"rank {rank}:\n{traceback.format_exc()}"
    unfinished = folder / f"rank-{rank}.writing"
    unfinished.write_text(f"{time.monotonic()}\n{text}")
    unfinished.rename(folder / f"rank-{rank}.error")
    _leave(1)


def _leave(code: int) -> None:
    """End without interpreter shutdown, which can wait for threads and sockets."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _first_error(folder: Path) -> str:
    errors = [path.read_text().split("\n", 1) for path in folder.glob("rank-*.error")]
    return min(errors, key=lambda error: float(error[0]))[1] if errors else ""


def _result(folder: Path, rank: int) -> Any:
    return pickle.loads((folder / f"rank-{rank}.result").read_bytes())
