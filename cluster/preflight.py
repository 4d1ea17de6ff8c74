"""One check per node before training: ``tandem preflight RUN GPUS MIN_FREE_GB``.

Each node prints ``ok NODE``, ``bad NODE: REASON``, ``cut NODE: REASON`` for a connection that fails
at either end, or ``wrong NODE: REASON`` for a fault that every node shares. The batch script treats
a node without a line as bad. A node first checks itself: run folder, space, devices. Then all nodes
meet at the ranks' address, try to reach each other, and all-reduce one number, by gloo, and by NCCL
where they have GPUs. It takes at most `MEETING_SECONDS` + `SUM_SECONDS`.
"""

import datetime
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from cluster.ranks import Ranks, derive

MEETING_SECONDS, CONNECT_SECONDS, SUM_SECONDS = 60.0, 5.0, 60.0
PEERS = 5  # that a node tries to reach, at distances 1, 2, 4, 8 and 16
SIOCGIFADDR = 0x8915  # Linux: the address of an interface

Fault = tuple[str, str]  # bad, cut or wrong, and the reason


def main(run: Path, gpus: int, min_free_gb: float) -> int:
    """Check this node and its connections; 0 when it passes, 1 when it does not."""
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    shared = build_fault(gpus) or space_fault(run, min_free_gb)
    alone = folder_fault(run) or device_fault(gpus) or memory_fault(gpus)
    together = connection_fault(derive(), gpus)  # always, or the other nodes would wait
    fault = ("wrong", shared) if shared else ("bad", alone) if alone else together
    print(f"{fault[0]} {node}: {fault[1]}" if fault else f"ok {node}", flush=True)
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
    count = torch.cuda.device_count()
    if count < gpus:
        return f"{count} of {gpus} GPUs found"
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


def connection_fault(ranks: Ranks, gpus: int) -> Fault | None:
    """Why this node cannot communicate with the others; None where it can.

    None too where another node is silent: the fault is that node's. The nodes meet at a store on
    the first one. Each tries to connect to `PEERS` others there, so that a fault is charged to the
    node that most of its peers miss. Only then do all of them sum a number, which any single node
    can make fail for all.
    """
    deadline = time.monotonic() + MEETING_SECONDS
    where = f"{ranks.master_addr}:{ranks.master_port}"
    try:
        store = dist.TCPStore(
            ranks.master_addr,
            ranks.master_port,
            is_master=ranks.rank == 0,
            timeout=datetime.timedelta(seconds=MEETING_SECONDS),
            wait_for_workers=False,
        )
        address = own_address(ranks.master_addr), 0
        with socket.create_server(address, backlog=2 * PEERS) as here:
            store.set(f"here/{ranks.rank}", "{}:{}".format(*here.getsockname()))
            present = _wait(store, ranks, "here", deadline)
            if present is None:
                return None
            missed = [rank for rank in _peers(ranks) if not _answers(present[rank])]
            store.set(f"missed/{ranks.rank}", " ".join(map(str, missed)))
            reports = _wait(store, ranks, "missed", deadline)
    except (RuntimeError, OSError) as error:
        return "cut", f"cannot reach {where}: {_reason(error)}"
    fault = reports and reachability_fault(ranks.rank, present, reports)
    return fault or _sum_fault(store, ranks, gpus)


def reachability_fault(rank: int, present: list[str], reports: list[str]) -> Fault | None:
    """The fault of this rank, by the nodes' addresses and the ranks that each node missed.

    `present` has the address of each node, and `reports` the ranks that it could not reach.
    """
    hosts = [address.rpartition(":")[0] for address in present]
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    missing = [set(report.split()) for report in reports]
    if len(set(hosts)) < len(hosts) and any(missing):
        same = next(host for host in hosts if hosts.count(host) > 1)
        through = f" of {interface}" if interface else ""
        return "wrong", f"several nodes have the address {same}{through}; set interface to another"
    missed_by = sum(str(rank) in missed for missed in missing)
    misses = len(missing[rank])
    if misses > 1 or missed_by > 1 or (len(present) == 2 and misses + missed_by):
        return (
            "cut",
            f"{hosts[rank]} and its peers cannot connect ({interface or 'any interface'})",
        )
    return None


def own_address(first: str) -> str:
    """This node's IPv4 address: that of the chosen interface, or the one that leads to `first`.

    Raises OSError for an interface that this node does not have.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].lstrip("=")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface and not interface.startswith("^"):
            request = struct.pack("256s", interface.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError as error:
                raise OSError(f"no interface {interface} with an address here") from error
            return socket.inet_ntoa(answer[20:24])
        probe.connect((first, 9))  # sends nothing
        return str(probe.getsockname()[0])


def _peers(ranks: Ranks) -> list[int]:
    """The ranks at distances 1, 2, 4, ... from this one: each node has as many that try it."""
    distances = [2**power for power in range(PEERS) if 2**power < ranks.world_size]
    return sorted({(ranks.rank + distance) % ranks.world_size for distance in distances})


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS):
            return True
    except OSError:
        return False


def _wait(store: dist.TCPStore, ranks: Ranks, word: str, deadline: float) -> list[str] | None:
    """The answers of all ranks under a word; None where a rank has said nothing in time."""
    keys = [f"{word}/{rank}" for rank in range(ranks.world_size)]
    seconds = max(deadline - time.monotonic(), 0.1)
    try:
        store.wait(keys, datetime.timedelta(seconds=seconds))
    except RuntimeError:
        return None
    return [store.get(key).decode() for key in keys]


def _sum_fault(store: dist.TCPStore, ranks: Ranks, gpus: int) -> Fault | None:
    usable = gpus > 0 and torch.cuda.is_available()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if usable else "gloo",  # checkpoints go over gloo on GPUs too
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=datetime.timedelta(seconds=SUM_SECONDS),
        )
        ones = [torch.ones(1, device=device) for device in ("cpu", "cuda:0")[: 1 + usable]]
        for total in ones:
            dist.all_reduce(total)
        totals = {int(total.item()) for total in ones}
        dist.barrier()  # rank 0 holds the store
        dist.destroy_process_group()
    except RuntimeError as error:
        return "cut", f"all-reduce failed: {_reason(error)}"
    if totals == {ranks.world_size}:
        return None
    return "cut", f"all-reduce gave {min(totals)} of {ranks.world_size}"


def _reason(error: Exception) -> str:
    """The last line of a message, above C++'s stack: there NCCL says what has failed."""
    return str(error).partition("\nException raised from")[0].splitlines()[-1]
