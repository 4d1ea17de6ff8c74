"""The sbatch script of a job, as one pure function of its description.

The script stands alone: it needs SLURM, bash and the files beside it, nothing of the checkout it
was submitted from, and a person can read it, change it and submit it again by hand.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.errors import LaunchError
from cluster.ranks import EXPORTED
from cluster.supervisor import SUPERVISOR


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

    Raises LaunchError for a value with a line break or another unprintable character, since
    sbatch's own option lines have no way to quote one.
    """
    _refuse_unprintable(job, cluster)
    parts = [_options(job, cluster), _work(job, cluster), _environment(cluster), SUPERVISOR]
    return "\n".join(parts)


def _options(job: Job, cluster: ClusterConfig) -> str:
    log = "%A_%a" if job.seeds else "%j"
    folder = str(job.run / "logs").replace("\\", "\\\\").replace("%", "%%")
    options = {
        "job-name": job.name,
        "nodes": cluster.nodes,
        "ntasks-per-node": str(cluster.ranks),
        **({"gpus-per-node": str(cluster.gpus_per_node)} if cluster.gpus_per_node else {}),
        "chdir": str(job.directory),
        "output": f"{folder}/slurm-{log}.log",
        "open-mode": "append",
        "signal": f"B:USR1@{cluster.warning_seconds}",
        _requeue_flag(job, cluster): "",
        **({"array": f"0-{len(job.seeds) - 1}"} if job.seeds else {}),
        **cluster.sbatch,
    }
    head = [
        "#!/bin/bash",
        f"# Job {job.name}, written by `tandem submit`. To submit it again: sbatch THIS_FILE",
    ]
    return "\n".join([*head, *(f"#SBATCH {option}" for option in _flags(options))]) + "\n"


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
        _array("srun", list(_flags(_srun(cluster), quoted=False))),
        f"ranks={cluster.ranks}  # per node",
        f"gpus={cluster.gpus_per_node}",
        f"min_free_gb={cluster.min_free_gb:g}",
        f"budget={cluster.fruitless_requeues}",
        f"may_requeue={_yes(cluster.requeue and not job.chained)}",
        f"chained={_yes(job.chained)}",
        f"preflight={_yes(cluster.preflight)}",
    ]
    if job.seeds:
        lines += [
            f"seeds=({' '.join(map(str, job.seeds))})",
            "seed=${seeds[$SLURM_ARRAY_TASK_ID]}",
            "run+=-seed$seed",
            f'train+=("seed=$seed" {_quote(f"name={job.name}-seed")}"$seed")',
        ]
    return "\n".join(lines) + "\n"


def _environment(cluster: ClusterConfig) -> str:
    lines = [
        "# Where it runs",
        f"unset {' '.join(EXPORTED)}",
        'export PYTHONPATH="$submission/code${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1',
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"',
        'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"',
    ]
    if cluster.modules:
        lines.append(f"module load {' '.join(map(_quote, cluster.modules))}")
    if cluster.venv:
        lines.append(f". {_quote(cluster.venv)}/bin/activate")
    if cluster.conda:
        lines += ['eval "$(conda shell.bash hook)"', f"conda activate {_quote(cluster.conda)}"]
    lines += [f"export {name}={_quote(text)}" for name, text in cluster.variables.items()]
    lines += ["before() {", *_indented(cluster.before), "}"]
    lines += ["after() {", *_indented(cluster.after), "}"]
    return "\n".join(lines) + "\n"


def _indented(commands: list[str]) -> Iterator[str]:
    yield from (f"  {command}" for command in commands or [":"])


def _requeue_flag(job: Job, cluster: ClusterConfig) -> str:
    return "requeue" if cluster.requeue and not job.chained else "no-requeue"


def _srun(cluster: ClusterConfig) -> dict[str, str]:
    # A rank that fails takes the others with it by itself; this ends those that hang. Killing at
    # the first bad exit instead would hide its code behind those of the killed.
    return {"wait": "300", **cluster.srun}


def _flags(options: Mapping[str, str], quoted: bool = True) -> Iterator[str]:
    for name, text in options.items():
        shown = _quote(text) if quoted else text
        yield f"--{name}={shown}" if text not in ("", "True") else f"--{name}"


def _array(name: str, words: list[str]) -> str:
    return f"{name}=({' '.join(map(_quote, words))})"


def _quote(text: str) -> str:
    return shlex.quote(text)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


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
