"""Runs shipped jobs through the real command line, one after another in one process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from click.testing import CliRunner

from cluster.ranks import reserved_port
from tandem import main
from tests.conftest import REPOSITORY, command_environment
from tests.distributed import set_rank_environment
from tests.fork_server import server

LIMIT = 500.0  # seconds for all of them


def run_jobs(told: Mapping[str, list[str]], folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> (exit code, output) of jobs given as name -> arguments, run in that order."""
    outcomes, errors = folder / "outcomes.jsonl", folder / "errors"
    with errors.open("wb") as file:
        jobs = server().start(
            _run_all, told, outcomes, environment=command_environment(), errors=file.fileno()
        )
    try:
        assert jobs.wait(LIMIT) == 0, errors.read_text()[-4000:]
    finally:
        jobs.kill()
    lines = map(json.loads, outcomes.read_text(encoding="utf-8").splitlines())
    return {name: (code, output) for name, code, output in lines}


def run(arguments: list[str]) -> tuple[int, str]:
    """Exit code and output; the traceback of a bug is shown."""
    result = CliRunner().invoke(main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def _run_all(told: Mapping[str, list[str]], outcomes: Path) -> None:
    """Run the jobs in a new process; it prints a line of JSON for each."""
    from trainer.evaluation import final_scores as evaluation

    evaluation.SPEED_SECONDS = 0.0
    os.chdir(REPOSITORY)
    torch.set_num_threads(1)
    with reserved_port() as port:
        set_rank_environment(0, 1, port)
        dist.init_process_group("gloo", rank=0, world_size=1)
    dist.destroy_process_group = lambda: None  # the next job goes on in the same group
    with outcomes.open("w", encoding="utf-8") as file:
        for name, arguments in told.items():
            print(json.dumps([name, *run(arguments)]), file=file, flush=True)
    os._exit(0)  # as in tests.distributed: do not wait for threads and sockets
