"""Which options of sbatch and srun a cluster config may set: all but those of the script.

Others are passed on, since only a site's own sbatch knows them: releases and plugins add some, and
``sbatch --help`` leaves out a fifth of what it takes. It refuses a misspelt one by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_GPUS = dict.fromkeys(
    ("gpus", "gpus-per-socket", "gpus-per-task", "ntasks-per-gpu", "tres-per-task"),
    "use gpus_per_node, which sets the number of ranks",
)
_TASKS = {
    "nodes": "use nodes",
    "ntasks": "use nodes and ranks_per_node",
    "ntasks-per-node": "use ranks_per_node",
    "gpus-per-node": "use gpus_per_node",
    **_GPUS,
}
# Options that the script sets itself, and what to use instead.
OWN_SBATCH = {
    **_TASKS,
    "job-name": "the job config's name is used",
    "output": "the log goes to the run folder",
    "error": "the log goes to the run folder",
    "open-mode": "the log is always appended to",
    "chdir": "the job starts in the folder it was submitted from",
    "signal": "use warning_seconds",
    "requeue": "use requeue",
    "no-requeue": "use requeue",
    "array": "use --seeds",
    "test-only": "use --dry-run",
    "wrap": "tandem submits its own script",
    "wait": "tandem submit returns at once; use `tandem status`",
    "parsable": "use `tandem status --json`",
    "clusters": "submit on the cluster that the job is to run on",
}
OWN_SRUN = {
    **_TASKS,
    "chdir": "the job starts in the folder it was submitted from",
    "multi-prog": "every rank runs the same program",
    "pty": "a job has no terminal",
    "export": "every rank gets the environment of the first node; use variables",
    "export-file": "every rank gets the environment of the first node; use variables",
}
OWN = {"sbatch": OWN_SBATCH, "srun": OWN_SRUN}


def refusal(command: str, name: str) -> str:
    """Why a cluster config may not set an option of sbatch or srun; empty where it may.

    SLURM takes an abbreviated name for the option, so it is refused as well.
    """
    meant = [key for key in OWN[command] if key.startswith(name)]
    return f"cannot be set: {OWN[command][min(meant, key=len)]}" if meant else ""


def without_own(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would change a job that is submitted from here.

    For sbatch, a ``SBATCH_*`` variable overrides the script's own line. Within a job, SLURM's
    variables describe that job, and sbatch would hand them on to the new one.
    """
    removed = {f"SBATCH_{name.upper().replace('-', '_')}" for name in OWN_SBATCH}
    removed |= {"SBATCH_ARRAY_INX"}
    if "SLURM_JOB_ID" in env:
        removed |= {name for name in env if name.startswith(("SLURM_", "SLURMD_", "SRUN_"))}
    return {name: text for name, text in env.items() if name not in removed - {"SLURM_CONF"}}


def gpus_in_gres(gres: str) -> int:
    """The GPUs per node in a ``--gres`` value: 4 in ``gpu:a100:4,lustre:1``.

    Raises ValueError where the GPUs are not in a form that SLURM accepts.
    """
    total = 0
    for part in gres.split(","):
        kind, *rest = re.sub(r"^gres[/:]", "", part.strip()).split(":")
        if kind != "gpu":
            continue
        named = rest[1:] if rest and not rest[0].isdecimal() else rest
        if len(named) > 1 or not all(count.isdecimal() for count in named):
            raise ValueError(f"{part!r} is not a number of GPUs; write gpu:2 or gpu:a100:2")
        total += int(named[0]) if named else 1
    return total
