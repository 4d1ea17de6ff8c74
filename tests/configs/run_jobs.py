"""Runs shipped jobs through the real command line, one after the other in one process.

``python -m tests.configs.run_jobs ARGUMENTS.json``: for each job its name and the arguments of
``tandem``. Prints one line of JSON for each: its name, exit code and what it printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from click.testing import CliRunner

from cluster.ranks import free_port
from tandem import main
from tests.conftest import REPOSITORY, command_environment
from tests.distributed import set_rank_environment


def run_jobs(told: Mapping[str, list[str]], folder: Path) -> dict[str, tuple[int, str]]:
    """Name -> (exit code, what it printed) of jobs given as name -> arguments, in that order."""
    listed = folder / "arguments.json"
    listed.write_text(json.dumps(told), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tests.configs.run_jobs", str(listed)],
        env=command_environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    return {name: (code, output) for name, code, output in lines}


def run(arguments: list[str]) -> tuple[int, str]:
    """Exit code and output; a bug's traceback shows."""
    result = CliRunner().invoke(main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


if __name__ == "__main__":
    from trainer.evaluation import final_scores as evaluation

    evaluation.SPEED_SECONDS = 0.0
    torch.set_num_threads(1)
    set_rank_environment(0, 1, free_port())
    dist.init_process_group("gloo", rank=0, world_size=1)
    dist.destroy_process_group = lambda: None  # the next job goes on in the same group
    for name, arguments in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")).items():
        code, output = run(arguments)
        print(json.dumps([name, code, output]), flush=True)
    os._exit(0)  # as in tests.distributed: do not wait for threads and sockets
