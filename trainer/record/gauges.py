"""Measurements of a run besides its losses: time, device utilisation, stalls, slow ranks."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from trainer.config import JobConfig
from trainer.learners.learner import Learner
from trainer.measure.process import Tracer
from trainer.measure.timing import BACKWARD, COMMUNICATION, FORWARD, STEP, clock
from trainer.record import utilisation
from trainer.run_folder.folder import RunFolder
from trainer.watch.slow_ranks import SlowRanks


class Gauges:
    """The measurements of one rank. `before` and `read` must be called on every rank."""

    def __init__(
        self, config: JobConfig, folder: RunFolder, attempt: int, device: torch.device
    ) -> None:
        """`attempt` counts the incarnations of the run, from 1."""
        rank = dist.get_rank()
        self._config, self._restarts, self._device = config, attempt - 1, device
        self._facts = utilisation.known_device(device)
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
            needed = utilisation.seconds_at_peak(configs, data, step - 1, self._facts)
            row["mfu"] = tokens_per_second * needed / dist.get_world_size()
        return row, lines

    def close(self) -> None:
        """Write the trace if one is still open."""
        self._tracer.close()

    def _look_at_ranks(self, step: int, row: dict[str, float]) -> list[str]:
        """Gather each rank's computing time in the timed step, and its memory."""
        ranks = torch.zeros(2, dist.get_world_size(), dtype=torch.float64, device=self._device)
        own = torch.tensor([_busy(row), clock.most_bytes()], dtype=torch.float64)
        ranks[:, dist.get_rank()] = own.to(self._device)
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
