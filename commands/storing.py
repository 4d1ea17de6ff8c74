"""The command that stores a frozen teacher's predictions."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from commands.job_configs import load_job, prepare
from commands.options import PATH
from commands.output import ignore_write_errors
from commands.training import launch_ranks, load_on_device, run_if_launched

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.config import JobConfig


@click.command()
@click.argument("config", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--nproc", type=click.IntRange(min=1), help="Processes on this machine.")
def store(config: str, overrides: tuple[str, ...], nproc: int | None) -> None:
    """Store the predictions of the frozen teacher of a job.

    Other jobs can read them. The section teacher.stored says where, and how many logits. Repeating
    the command writes what is missing. Also the entry point of each rank under srun and torchrun.
    """
    ignore_write_errors()

    def load() -> JobConfig:
        return prepare(load_job(config, overrides))

    run_if_launched(lambda: _store_as_rank(load), nproc, config, overrides)
    job = load_on_device(config, overrides)  # errors show before ranks start
    as_fork = partial(_store_as_rank, lambda: job)
    sys.exit(launch_ranks(["store", config, *overrides], as_fork, nproc))


def _store_as_rank(load: Callable[[], JobConfig]) -> int:
    from cluster.ranks import derive, export, reported
    from cluster.signals import StopRequest

    with StopRequest() as stop:
        export(derive())
        from trainer.storing import store

        outcome = store(load, lambda: stop.requested, click.echo)
        return reported(outcome.value)
