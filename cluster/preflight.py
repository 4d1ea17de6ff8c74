"""One check per node before training: ``python -m cluster.preflight RUN GPUS MIN_FREE_GB``.

Each node prints ``ok NODE``, ``bad NODE: REASON``, or ``wrong NODE: REASON`` for a fault that every
node shares. The batch script treats a node without a line as bad. A node first checks itself: run
folder, space, devices. Then all nodes rendezvous at the ranks' address and all-reduce one number,
by gloo, and by NCCL where they have GPUs.
"""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from cluster.ranks import Ranks, derive

RENDEZVOUS_TIMEOUT = datetime.timedelta(seconds=60)


def main(run: Path, gpus: int, min_free_gb: float) -> int:
    """Check this node and its connections; 0 when it passes, 1 when it does not."""
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    own = folder_fault(run) or device_fault(gpus) or memory_fault(gpus)
    shared = build_fault(gpus) or space_fault(run, min_free_gb)
    own = rendezvous_fault(derive(), gpus) or own  # always, or the other nodes would wait
    word, fault = ("wrong", shared) if shared else ("bad", own)
    print(f"{word} {node}: {fault}" if fault else f"ok {node}", flush=True)
    return 1 if fault else 0


def build_fault(gpus: int) -> str | None:
    """Why this PyTorch build cannot use any GPU; None where it can."""
    if not gpus or torch.version.cuda or torch.version.hip:
        return None
    return (
        f"PyTorch {torch.__version__} of {sys.executable} is built without CUDA, but the job "
        f"requests {gpus} GPUs; install a build with CUDA, or name another environment (venv, "
        "conda, container, python)"
    )


def space_fault(run: Path, min_free_gb: float) -> str | None:
    """Why the run folder, which all nodes share, has too little space; None where it has enough."""
    try:
        free = shutil.disk_usage(run).free / 1e9
    except OSError:
        return None  # this node's fault, which `folder_fault` reports
    return f"{run}: {free:.1f} GB free of {min_free_gb:g} needed" if free < min_free_gb else None


def folder_fault(run: Path) -> str | None:
    """Why this node cannot write to the run folder; None where it can."""
    try:
        with tempfile.NamedTemporaryFile(dir=run, prefix=".preflight-"):
            return None
    except OSError as error:
        return f"{run}: {error.strerror}"


def device_fault(gpus: int) -> str | None:
    """Why this node's GPUs cannot compute; None where they can."""
    found = torch.cuda.device_count()
    if found < gpus:
        return f"{found} of {gpus} GPUs found"
    for index in range(gpus):
        try:
            ones_NN = torch.ones(256, 256, device=f"cuda:{index}")
            total = (ones_NN @ ones_NN).sum().item()
        except RuntimeError as error:
            return f"GPU {index}: {str(error).splitlines()[0]}"
        if total != 256.0**3:
            return f"GPU {index} computes {total} instead of {256.0**3}"
    return None


def memory_fault(gpus: int) -> str | None:
    """Which GPU has uncorrected memory errors; None where there are none, or nothing is known."""
    query = "--query-gpu=index,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    if not gpus or not shutil.which(command[0]):
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return f"nvidia-smi: {' '.join(str(error).split())}"
    for line in done.stdout.splitlines():
        index, _, errors = line.partition(", ")
        if errors.isdecimal() and int(errors):
            return f"GPU {index} has {errors} uncorrected memory errors; reset it"
    return None


def rendezvous_fault(ranks: Ranks, gpus: int) -> str | None:
    """Why this node cannot communicate with the others; None where it can.

    Where another node does not answer, the fault is that node's, not this one's.
    """
    where = f"{ranks.master_addr}:{ranks.master_port}"
    try:
        store = dist.TCPStore(
            ranks.master_addr,
            ranks.master_port,
            is_master=ranks.rank == 0,
            timeout=RENDEZVOUS_TIMEOUT,
            wait_for_workers=False,
        )
        store.set(f"here/{ranks.rank}", "")
    except (RuntimeError, ConnectionError) as error:
        return f"cannot reach {where}: {str(error).splitlines()[0]}"
    try:
        store.wait([f"here/{rank}" for rank in range(ranks.world_size)], RENDEZVOUS_TIMEOUT)
    except RuntimeError:
        return None
    return _sum_fault(store, ranks, gpus)


def _sum_fault(store: dist.TCPStore, ranks: Ranks, gpus: int) -> str | None:
    usable = gpus > 0 and torch.cuda.is_available()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if usable else "gloo",  # checkpoints go over gloo on GPUs too
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=RENDEZVOUS_TIMEOUT,
        )
        ones = [torch.ones(1, device=device) for device in ("cpu", "cuda:0")[: 1 + usable]]
        for one in ones:
            dist.all_reduce(one)
        totals = {int(one.item()) for one in ones}
        dist.barrier()  # rank 0 holds the store
        dist.destroy_process_group()
    except RuntimeError as error:
        return f"all-reduce failed: {str(error).splitlines()[0]}"
    if totals == {ranks.world_size}:
        return None
    return f"all-reduce gave {min(totals)} of {ranks.world_size}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
