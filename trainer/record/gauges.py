"""Measurements of a run besides its losses: time, device utilisation, stalls, slow ranks.

MFU is model FLOPs utilisation, the fraction of the devices' peak rate (arXiv 2204.02311). The FLOPs
are those of the models' forward and backward matrix products (`model.flops_per_token`) for the
tokens trained on, without padding; a frozen teacher has no backward, and counts too in steps in
which nobody reads it. Recomputation is not counted, nor are matrix products of the losses beyond
the learner's own projection. The peak is the manufacturer's dense rate for the learner's precision
(``configs/device``).

Stragglers are ranks that compute longer than the others, which wait for them. Every rank's step
takes the same wall time, since all ranks wait for the slowest; the time that a rank is busy
differs. A rank is slow when it is busy more than 1.5 times the median in several logged steps in a
row. The log names it once, with its host. ``slow_ranks.json``, which `tandem status` shows, names
it while it is slow.
"""

import contextlib
import json
import socket
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from configs.devices import DeviceConfig, device_named
from configs.durable import atomic_write
from data_pipeline import DataConfig
from model import describe
from trainer.config import JobConfig
from trainer.learner_config import LearnerConfig
from trainer.learner_names import BACKWARD, COMMUNICATION, FORWARD, STEP
from trainer.learners.learner import Learner
from trainer.measure import Tracer, clock
from trainer.run_folder.folder import RunFolder

RATIO = 1.5
IN_A_ROW = 3


def known_device(device: torch.device) -> DeviceConfig | None:
    """The config of the device; None for a CPU, or a GPU without a file in configs/device."""
    return device_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def seconds_at_peak(
    learners: Iterable[LearnerConfig], data: DataConfig, step: int, device: DeviceConfig
) -> float:
    """Seconds that a device at its peak rate would need per token of `step` in all `learners`."""
    length, _ = data.length_and_packing_at(step)
    total = 0.0
    for learner in learners:
        if learner.stored is not None:
            continue  # its predictions are read, and it does not run
        size = describe(learner.architecture, length, data.masking_at(step).rate_at(step))
        flops = size.flops_per_token_forward if learner.frozen else size.flops_per_token
        total += flops / device.flops(learner.precision)
    return total


class SlowRanks:
    """Tracks over the logged steps how long each rank is busy."""

    def __init__(self, hosts: Sequence[str], file: Path) -> None:
        """`hosts` has each rank's host name."""
        self._hosts, self._file = hosts, file
        self._slow_steps = [0] * len(hosts)  # in a row, up to now
        self._slow: set[int] = set()
        self._reported: set[int] = set()
        file.unlink(missing_ok=True)

    def update(self, step: int, busy: Sequence[float]) -> list[str]:
        """Add the seconds that each rank was busy; returns a line for each newly slow rank."""
        slow = slow_among(busy)
        self._slow_steps = [
            count + 1 if rank in slow else 0 for rank, count in enumerate(self._slow_steps)
        ]
        now = {rank for rank, count in enumerate(self._slow_steps) if count >= IN_A_ROW}
        lines = [self._line(rank, busy) for rank in sorted(now - self._reported)]
        self._reported |= now
        if now != self._slow:
            self._slow = now
            with contextlib.suppress(OSError):  # a full disk: the log has the lines
                self._write(step, busy)
        return lines

    def _line(self, rank: int, busy: Sequence[float]) -> str:
        times = busy[rank] / statistics.median_low(busy)
        return f"rank {rank} on {self._hosts[rank]} is slow: it computes {times:.1f} times as long"

    def _write(self, step: int, busy: Sequence[float]) -> None:
        """Write the ranks that are slow now; remove the file when there is none."""
        if not self._slow:
            self._file.unlink(missing_ok=True)
            return
        rows = [
            {"rank": rank, "host": self._hosts[rank], "step": step, "says": self._line(rank, busy)}
            for rank in sorted(self._slow)
        ]
        atomic_write(self._file, json.dumps(rows))


def slow_among(busy: Sequence[float]) -> set[int]:
    """The ranks that are busy more than `RATIO` times the (low) median."""
    usual = statistics.median_low(busy)
    return {rank for rank, seconds in enumerate(busy) if seconds > RATIO * usual > 0}


class Gauges:
    """The measurements of one rank. `before` and `read` must be called on every rank."""

    def __init__(
        self, config: JobConfig, folder: RunFolder, attempt: int, device: torch.device
    ) -> None:
        """`attempt` counts the incarnations of the run, from 1."""
        rank = dist.get_rank()
        self._config, self._restarts, self._device = config, attempt - 1, device
        self._facts = known_device(device)
        self._tracer = Tracer(config.profile, folder.path / "profile" / f"rank-{rank:03d}.json")
        self._stalled = 0.0
        hosts = ["" for _ in range(dist.get_world_size())]
        dist.all_gather_object(hosts, socket.gethostname())
        self._slow = SlowRanks(hosts, folder.slow_ranks) if rank == 0 else None

    def before(self, step: int, is_logged: bool) -> None:
        """Called before the job's `step`, whose parts are timed if it `is_logged`."""
        self._tracer.before(step)
        clock.running = is_logged

    def stalled(self, seconds: float) -> None:
        """Count seconds for which a checkpoint has stopped training."""
        self._stalled += seconds

    def read(
        self, step: int, tokens_per_second: float, learners: Sequence[Learner]
    ) -> tuple[dict[str, float], list[str]]:
        """The metrics since the last call, and lines about slow ranks. Collective.

        `step` counts from 1; `learners` took part in it.
        """
        clock.running = False
        row = clock.take()
        lines = self._look_at_ranks(step, row)
        row["checkpoint_stall"], self._stalled = self._stalled, 0.0
        row["restarts"] = self._restarts
        if self._facts is not None:
            configs = [learner.config for learner in learners]
            data = self._config.data
            needed = seconds_at_peak(configs, data, step - 1, self._facts)
            row["mfu"] = tokens_per_second * needed / dist.get_world_size()
        return row, lines

    def close(self) -> None:
        """Write the trace if one is still open."""
        self._tracer.close()

    def _look_at_ranks(self, step: int, row: dict[str, float]) -> list[str]:
        """Gather each rank's computing time in the timed step, and its memory."""
        ranks = torch.zeros(2, dist.get_world_size(), dtype=torch.float64, device=self._device)
        local = torch.tensor([_busy(row), clock.most_bytes()], dtype=torch.float64)
        ranks[:, dist.get_rank()] = local.to(self._device)
        dist.all_reduce(ranks)
        seconds, memory = ranks.tolist()
        row["memory"] = int(max(memory))
        row["slowest_rank"] = max(seconds) / (statistics.median_low(seconds) or 1.0)
        return self._slow.update(step, seconds) if self._slow is not None else []


def _busy(row: dict[str, float]) -> float:
    """Computing time in seconds: all parts, without waiting for other ranks."""
    parts = {key.rpartition("/seconds_")[2]: 0.0 for key in row}
    for key, value in row.items():
        parts[key.rpartition("/seconds_")[2]] += value
    computing = sum(parts.get(part, 0.0) for part in (FORWARD, BACKWARD, STEP))
    return max(0.0, computing - parts.get(COMMUNICATION, 0.0))
