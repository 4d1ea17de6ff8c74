"""Which options of sbatch and srun a cluster config may set."""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping

from cluster.errors import LaunchError

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

# Options of every release since 20.11. Others may be misspelt, or come from a site's plugins.
_NAMES = """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment
    constraint container container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu
    cpus-per-task deadline delay-boot dependency distribution error exclude exclusive export
    export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node
    gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu
    mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core
    ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output overcommit
    oversubscribe parsable partition power prefer priority profile propagate qos quiet reboot
    requeue reservation resv-ports segment signal sockets-per-node spread-job stepmgr switches
    test-only thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid
    use-min-nodes verbose wait wait-all-nodes wckey wrap
"""
SBATCH = frozenset(_NAMES.split())
_ONLY_SRUN = """
    accel-bind bcast bcast-exclude compress cpu-bind disable-status epilog exact external-launcher
    immediate interactive kill-on-bad-exit label max-exit-timeout mpi msg-timeout multi-prog
    no-allocate overlap pty prolog preserve-env quit-on-interrupt relative send-libs slurmd-debug
    task-epilog task-prolog threads treewidth unbuffered whole
"""
_WITHOUT_VALUE = """
    contiguous exclusive get-user-env hold ignore-pbs kill-on-invalid-dep nice no-kill no-requeue
    oom-kill-step overcommit oversubscribe parsable propagate quiet reboot requeue spread-job
    stepmgr test-only use-min-nodes verbose wait
"""
# Options for which the words true and the empty text are values.
WITH_VALUE = SBATCH - {*_WITHOUT_VALUE.split()}


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


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise LaunchError for a name that is not an option of this site's sbatch.

    Of an option that only srun has, the message says where to write it.
    A site's plugins add options, which ``sbatch --help`` lists on its login nodes. Where there is
    no sbatch, a name is refused only if it resembles a known one.
    """
    for name in names:
        if name in SBATCH:
            continue
        here = _listed_by_sbatch()
        if name in here:
            continue
        if name in _ONLY_SRUN.split():
            place = OWN_SRUN.get(
                name, f"write it under srun in the cluster's file: srun: {{{name}: ...}}"
            )
            raise LaunchError(f"sbatch.{name}: is an option of srun; {place}")
        longer = sorted(known for known in SBATCH if known.startswith(name))
        likely = longer or difflib.get_close_matches(name, SBATCH, 1, cutoff=0.7)
        if likely or here:
            hint = f"; did you mean {likely[0]}?" if likely else ""
            raise LaunchError(f"sbatch.{name}: sbatch has no such option{hint}")


def _listed_by_sbatch() -> set[str]:
    if not shutil.which("sbatch"):
        return set()
    told = subprocess.run(["sbatch", "--help"], capture_output=True, text=True, check=False)
    return set(re.findall(r"--([a-z][a-z0-9-]+)", told.stdout))
