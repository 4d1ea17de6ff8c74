"""The sbatch script of a job, a pure function of the job and the cluster config.

The script is self-contained: it needs SLURM, bash and the files beside it, but not the checkout it
was submitted from. A user can read it, edit it and submit it by hand.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import configs
from cluster.config import ClusterConfig
from cluster.errors import LaunchError
from cluster.ranks import EXPORTED

# The same in every script; the last part does the work, with functions of the parts before it.
PARTS = [Path(__file__).with_name(name) for name in ("accounts.sh", "supervisor.sh")]
BACKSLASH = "\\"
SECRET = "WANDB_API_KEY"
FLAG = ("", "true")  # values of an option that has none
LEFT_OUT = "false"


@dataclass(frozen=True)
class Job:
    """One submission; every path is absolute and visible from every node."""

    name: str
    run: Path  # the run folder
    submission: Path  # holds this script, `config.yaml` and the code snapshot
    directory: Path  # where relative paths in the config start
    python: str
    seeds: tuple[int, ...] = ()  # a job array with one run per seed
    chained: bool = False  # another job of the same run follows, so this one is never requeued


def build(job: Job, cluster: ClusterConfig) -> str:
    """The text of the script.

    Raises LaunchError where a value cannot be quoted in an ``#SBATCH`` line: a line break or other
    unprintable character, or a ``%`` or backslash in the log's path. Also raises it for a variable
    that the script itself uses, and for a Weights & Biases key, which others could read.
    """
    _refuse_unprintable(job, cluster)
    if set(str(job.run)) & {"%", BACKSLASH}:
        raise LaunchError(f"{job.run}: SLURM cannot log to a path with % or {BACKSLASH}; rename it")
    work = _work(job, cluster)
    supervisor = "\n".join(part.read_text(encoding="utf-8") for part in PARTS)
    _refuse_own_names(cluster, work + supervisor)
    text = "\n".join([_options(job, cluster), work, _environment(cluster), supervisor])
    if f"{SECRET}=" in text:
        raise LaunchError(
            f"{SECRET}: the key would be readable in the script; run `wandb login` once, or export "
            "it in the shell that submits"
        )
    return text


def _options(job: Job, cluster: ClusterConfig) -> str:
    log = "%A_%a" if job.seeds else "%j"
    options = {
        "job-name": job.name,
        "comment": job.name,
        "nodes": cluster.nodes,
        **_tasks(cluster),
        **_gpus(cluster),
        "chdir": str(job.directory),
        "output": f"{job.run}/logs/slurm-{log}.log",
        "open-mode": "append",
        "signal": f"B:USR1@{cluster.warning_seconds}",
        ("requeue" if _may_requeue(job, cluster) else "no-requeue"): "",
        **({"array": f"0-{len(job.seeds) - 1}"} if job.seeds else {}),
        **cluster.sbatch,
    }
    # Unlike a shell, sbatch reads a backslash within single quotes as an escape.
    lines = [
        f"#SBATCH {_option(name, _quote(text.replace(BACKSLASH, BACKSLASH * 2)), text)}"
        for name, text in options.items()
        if text.lower() != LEFT_OUT
    ]
    head = [
        "#!/bin/bash",
        f"# Job {job.name}, written by `tandem submit`. To submit it again: sbatch THIS_FILE",
    ]
    return "\n".join([*head, *lines]) + "\n"


def _gpus(cluster: ClusterConfig) -> dict[str, str]:
    if not cluster.gpus or cluster.asks_by_gres:
        return {}
    return {"gpus-per-node": cluster.gpus_per_node}


def _tasks(cluster: ClusterConfig) -> dict[str, str]:
    """The option that reserves CPUs for the ranks of a node.

    With a range of nodes it states CPUs, not tasks: with tasks, SLURM would fix the number of nodes
    at the first start, and a requeued job could not resume with fewer.
    """
    if "-" not in cluster.nodes:
        return {"ntasks-per-node": str(cluster.ranks)}
    return {"mincpus": str(cluster.ranks * int(cluster.sbatch.get("cpus-per-task", "1")))}


def _work(job: Job, cluster: ClusterConfig) -> str:
    """The shell variables that describe the job."""
    python = job.python
    train = [python, f"{job.submission}/code/tandem.py", "train", f"{job.submission}/config.yaml"]
    lines = [
        "# What runs",
        f"run={_quote(str(job.run))}",
        f"submission={_quote(str(job.submission))}",
        _array("train", [*cluster.container, *train]),
        _array("check", [*cluster.container, python, "-m", "cluster.preflight"]),
        _array("srun", [_option(name, text, text) for name, text in _srun(cluster).items()]),
        f"ranks={cluster.ranks}  # per node",
        f"gpus={cluster.gpus}",
        f"min_free_gb={cluster.min_free_gb:g}",
        f"budget={cluster.max_requeues_without_progress}",
        *_limits(cluster),
        f"may_requeue={_yes(_may_requeue(job, cluster))}",
        f"chained={_yes(job.chained)}",
        f"preflight={_yes(cluster.preflight)}",
    ]
    if not job.seeds:
        lines.append("seed=")
    else:
        lines += [
            f"seeds=({' '.join(map(str, job.seeds))})",
            "seed=${seeds[$SLURM_ARRAY_TASK_ID]}",
            "run+=-seed$seed",
            f'train+=("seed=$seed" {_name_of_seed(job.name)})',
            'mkdir -p "$run/logs" && exec >>"$run/logs/slurm-$SLURM_JOB_ID.log" 2>&1',
        ]
    return "\n".join(lines) + "\n"


def _environment(cluster: ClusterConfig) -> str:
    lines = [
        "# Where it runs: what the first node exports reaches every rank",
        f"unset {' '.join(EXPORTED)}",
        "export SLURM_EXPORT_ENV=ALL  # also where sbatch was told --export=NONE",
        'export PYTHONPATH="$submission/code${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1',
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"',
        'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"',
        "",
        "# A line that fails ends the job, unless it says `|| true`",
        *_function("set_up", _set_up(cluster)),
        "",
        *_function("after", [f"may {_quote(line)}" for line in cluster.after]),
        *_function("at_end", [f"may {_quote(line)}" for line in cluster.at_end]),
    ]
    return "\n".join(lines) + "\n"


def _set_up(cluster: ClusterConfig) -> list[str]:
    uses_module = any(re.search(r"\bmodule\b", line) for line in cluster.before)
    lines = ["find_module"] if cluster.modules or uses_module else []
    lines += [f"must {_quote(f'module load {_quote(module)}')}" for module in cluster.modules]
    if cluster.venv:
        programs = f"{_quote(cluster.venv)}/bin"
        lines += [f"must {_quote(f'. {programs}/activate')}"]
        lines += [f"must {_quote(f'[ -x {programs}/python ]')}"]
    if cluster.conda:
        lines.append("""must 'eval "$(conda shell.bash hook)"'""")
        lines.append(f"must {_quote(f'conda activate {_quote(cluster.conda)}')}")
    if cluster.interface:
        lines.append(f"export NCCL_SOCKET_IFNAME={_quote(cluster.interface)}")
        lines.append(f"export GLOO_SOCKET_IFNAME={_quote(cluster.interface)}")
    lines += [f"export {name}={_quote(text)}" for name, text in cluster.variables.items()]
    return [*lines, *(f"must {_quote(line)}" for line in cluster.before)]


def _function(name: str, lines: list[str]) -> list[str]:
    return [f"{name}() {{", *(f"  {line}" for line in lines or [":"]), "}"]


def _may_requeue(job: Job, cluster: ClusterConfig) -> bool:
    return cluster.requeue and not job.chained


def _srun(cluster: ClusterConfig) -> dict[str, str]:
    # When one rank fails, the others fail with it; --wait ends those that hang. With
    # --kill-on-bad-exit, the exit codes of the killed ranks would hide that of the first.
    options = {"wait": "300", **cluster.srun}
    return {name: text for name, text in options.items() if text.lower() != LEFT_OUT}


def _option(name: str, shown: str, text: str) -> str:
    return f"--{name}" if text.lower() in FLAG else f"--{name}={shown}"


def _array(name: str, words: list[str]) -> str:
    return f"{name}=({' '.join(map(_quote, words))})"


def _quote(text: str) -> str:
    return shlex.quote(text)


def _name_of_seed(name: str) -> str:
    """The override that names the run of $seed, in bash."""
    plain = f"name={name}-seed"
    if configs.assigned([f"{plain}0"]) == {"name": f"{name}-seed0"}:
        return f'{_quote(plain)}"$seed"'
    before, after = configs.assignment("name", f"{name}-seed\n").rsplit("\\n", 1)
    return f'{_quote(before)}"$seed"{_quote(after)}'


def _limits(cluster: ClusterConfig) -> Iterator[str]:
    """The caps on all starts together, empty for no limit: bash computes in whole numbers."""
    starts, hours = cluster.max_requeues, cluster.max_gpu_hours
    yield f"max_requeues={'' if starts is None else starts}"
    yield f"max_gpu_hours={'' if hours is None else f'{hours:g}'}"
    yield f"max_gpu_seconds={'' if hours is None else int(hours * 3600)}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _refuse_own_names(cluster: ClusterConfig, text: str) -> None:
    own = set(re.findall(r"(?:^|[ ;(])([a-z_]+)\+?=", text, re.MULTILINE))
    for name in own & cluster.variables.keys():
        raise LaunchError(f"variables.{name}: the script uses this name itself; choose another")


def _refuse_unprintable(job: Job, cluster: ClusterConfig) -> None:
    values = [
        *(("name", job.name), ("run", str(job.run)), ("directory", str(job.directory))),
        *(("python", job.python), ("venv", cluster.venv), ("conda", cluster.conda)),
        *(("container", word) for word in cluster.container),
        *(("modules", word) for word in cluster.modules),
        *((f"sbatch.{name}", text) for name, text in cluster.sbatch.items()),
        *((f"srun.{name}", text) for name, text in cluster.srun.items()),
        *((f"variables.{name}", text) for name, text in cluster.variables.items()),
    ]
    for key, text in values:
        if not text.isprintable():
            raise LaunchError(
                f"{key}: {text!r} has a line break or unprintable character; remove it"
            )
