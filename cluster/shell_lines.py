"""The lines of shell that a site's config has, checked before they are in a script."""

from __future__ import annotations

import shutil
import subprocess

from cluster.config import ClusterConfig
from cluster.errors import LaunchError


def refuse_broken(cluster: ClusterConfig) -> None:
    """Raise LaunchError for an entry of these keys that bash cannot read by itself."""
    for key in ("before", "after", "at_end"):
        for number, line in enumerate(getattr(cluster, key), start=1):
            if words := _complaint(line):
                raise LaunchError(f"{key}: line {number} ({line!r}): {words}")


def _complaint(line: str) -> str:
    """What bash says of a line; nothing where it is sound, or where there is no bash to ask."""
    if not shutil.which("bash"):
        return ""
    read = subprocess.run(["bash", "-n", "-c", line], capture_output=True, text=True, check=False)
    told = read.stderr.strip().splitlines()[:1]
    return "".join(told).removeprefix("bash: ").removeprefix("-c: ")
