"""The sbatch script of a job, as one pure function of its description.

The script stands alone: it needs SLURM, bash and the files beside it, nothing of the checkout it
was submitted from, and a person can read it, change it and submit it again by hand.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.errors import LaunchError
from cluster.ranks import EXPORTED

# The same in every script; the last one does the work, with functions of those before it.
PARTS = [Path(__file__).with_name(name) for name in ("accounts.sh", "supervisor.sh")]
BACKSLASH = "\\"
SECRET = "WANDB_API_KEY"
FLAG = ("", "true")  # values of an option that has none
LEFT_OUT = "false"


@dataclass(frozen=True)
class Job:
    """What is submitted; every path is absolute and visible from every node."""

    name: str
    run: Path  # the run folder
    submission: Path  # holds this script, `config.yaml` and the code snapshot
    directory: Path  # where relative paths in the config start
    python: str
    seeds: tuple[int, ...] = ()  # an array with a run of its own per seed
    chained: bool = False  # another job of the same run follows, so this one is not requeued


def build(job: Job, cluster: ClusterConfig) -> str:
    """The text of the script.

    Raises LaunchError for what sbatch's option lines have no way to quote: a line break or another
    unprintable character anywhere, and a ``%`` or a backslash in the path of the log. Raises it as
    well for a variable that the script has itself, and for a key of Weights & Biases, which must
    not lie in a file that others read.
    """
    _refuse_unprintable(job, cluster)
    if set(str(job.run)) & {"%", BACKSLASH}:
        raise LaunchError(f"{job.run}: SLURM cannot log to a path with % or {BACKSLASH} in it")
    work = _work(job, cluster)
    supervisor = "\n".join(part.read_text(encoding="utf-8") for part in PARTS)
    _refuse_own_names(cluster, work + supervisor)
    text = "\n".join([_options(job, cluster), work, _environment(cluster), supervisor])
    if f"{SECRET}=" in text:
        raise LaunchError(
            f"{SECRET}: the script would hold it; run `wandb login` once, or export it in the "
            "shell that submits, whose environment the job gets"
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
    # In these lines, unlike in a shell, a backslash escapes within single quotes as well.
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
    """Room for the ranks of a node.

    With a range of nodes it is asked for in CPUs: told in tasks, SLURM would fix the number of
    nodes at the first start, and a requeued job could not go on with fewer.
    """
    if "-" not in cluster.nodes:
        return {"ntasks-per-node": str(cluster.ranks)}
    return {"mincpus": str(cluster.ranks * int(cluster.sbatch.get("cpus-per-task", "1")))}


def _work(job: Job, cluster: ClusterConfig) -> str:
    """The shell variables that say what runs."""
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
        f"budget={cluster.fruitless_requeues}",
        f"max_requeues={_number(cluster.max_requeues)}",
        f"max_gpu_hours={_number(cluster.max_gpu_hours)}",
        f"max_gpu_seconds={_number(cluster.max_gpu_hours, 3600)}",
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
            f'train+=("seed=$seed" {_quote(f"name={job.name}-seed")}"$seed")',
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
    # A rank that fails takes the others with it by itself; this ends those that hang. Killing at
    # the first bad exit instead would hide its code behind those of the killed.
    options = {"wait": "300", **cluster.srun}
    return {name: text for name, text in options.items() if text.lower() != LEFT_OUT}


def _option(name: str, shown: str, text: str) -> str:
    return f"--{name}" if text.lower() in FLAG else f"--{name}={shown}"


def _array(name: str, words: list[str]) -> str:
    return f"{name}=({' '.join(map(_quote, words))})"


def _quote(text: str) -> str:
    return shlex.quote(text)


def _number(value: float | None, unit: int = 1) -> str:
    """Nothing for no cap."""
    return "" if value is None else f"{value:g}" if unit == 1 else str(int(value * unit))


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _refuse_own_names(cluster: ClusterConfig, text: str) -> None:
    own = set(re.findall(r"(?:^|[ ;(])([a-z_]+)\+?=", text, re.MULTILINE))
    for name in own & cluster.variables.keys():
        raise LaunchError(f"variables.{name}: the script has a variable of that name; take another")


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
            raise LaunchError(f"{key}: {text!r} holds a line break or an unprintable character")
