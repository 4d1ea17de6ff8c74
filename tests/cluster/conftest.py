"""Stand-ins for SLURM's commands, as shell scripts."""

import os

import pytest

from cluster import slurm

START = (
    "sbatch: Job 41 to start at 2026-05-01T12:00:00 using 2 processors on nodes n1 in partition x"
)
PROGRAMS = {
    "sbatch": f"""
        [ "$*" != --test-only ] || {{ echo '{START}' >&2; exit 0; }}
        echo "$*" >>"$0.calls"; echo 41""",
    "squeue": ":",
    "scontrol": ":",
}


def install(tmp_path, **programs):
    """Put shell scripts of these names on the path that `slurm_programs` sets."""
    for name, text in programs.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)


@pytest.fixture
def slurm_programs(tmp_path, monkeypatch):
    """An sbatch that accepts every job, and an empty queue."""
    install(tmp_path, **PROGRAMS)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "PAUSE_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
