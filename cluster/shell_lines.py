"""Syntax check of the shell commands in a cluster config, before they go into a script."""

from __future__ import annotations

import shutil
import subprocess

from cluster.config import ClusterConfig
from cluster.errors import LaunchError


def refuse_broken(cluster: ClusterConfig) -> None:
    """Raise LaunchError for a command in `before`, `after` or `at_end` that bash cannot parse."""
    for key in ("before", "after", "at_end"):
        for number, line in enumerate(getattr(cluster, key), start=1):
            if words := _complaint(line):
                raise LaunchError(f"{key}[{number - 1}]: {line!r}: {words}")


def _complaint(line: str) -> str:
    """Bash's syntax error for a line; empty where there is none, or no bash."""
    if not shutil.which("bash"):
        return ""
    read = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, check=False)
    told = read.stderr.strip().splitlines()[:1]
    return "".join(told).removeprefix("bash: ").removeprefix("-c: ")
