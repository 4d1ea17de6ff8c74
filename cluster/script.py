"""The sbatch script of a job, a pure function of the job and the cluster config.

The script says what runs and where. What happens when the ranks end is in ``supervisor.sh``, which
it sources from the copy in its submission. It needs SLURM, bash and the files beside it, but not
the checkout it was submitted from. A user can read it, edit it and submit it by hand.
"""

import contextlib
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import configs
from cluster.config import ClusterConfig
from cluster.errors import LaunchError
from cluster.ranks import EXPORTED

# What the script sources; the first sources the others, from its own folder.
PARTS = [
    Path(__file__).with_name(f"{name}.sh")
    for name in ("supervisor", "controller", "accounts", "nodes")
]
BACKSLASH = "\\"
SECRET = "WANDB_API_KEY"
FLAG = ("", "true")  # values of an option that has none
LEFT_OUT = "false"
# Options of srun that change what the check of the nodes prints, or where.
RESHAPING = ("error", "input", "label", "open-mode", "output", "quiet", "unbuffered", "verbose")
# What the shell that submits may have set for its own use of srun.
SHELLS_OWN = (
    "SLURM_LABELIO",
    "SLURM_STDERRMODE",
    "SLURM_STDINMODE",
    "SLURM_STDOUTMODE",
    "SRUN_ERROR",
    "SRUN_INPUT",
    "SRUN_LABELIO",
    "SRUN_OUTPUT",
)

START = r"""# What happens when the ranks end, and when SLURM sends a signal
supervisor=$submission/code/cluster/supervisor.sh
mkdir -p "$run/logs" && exec >>"$log" 2>&1 && [ -r "$supervisor" ] && . "$supervisor"

# Only a first node that cannot use the run folder gets here: it gives the job back, and is left out
# unless too few nodes would remain.
trap "" TERM  # requeueing ends this shell as well
without=$(scontrol -o show job "$job" | sed -n 's/.* ExcNodeList=\([^ (]*\).*/\1/p')
without=${without:+$without,}${SLURMD_NODENAME:-$HOSTNAME}
[ $may_requeue = yes ] && [ "${SLURM_RESTART_COUNT:-0}" -lt $budget ] &&
  scontrol requeue "$job" && sbatch --test-only --exclude="$without" "$submission/job.sbatch" &&
  scontrol update jobid="$job" ExcNodeList="$without"
exit 69
"""


@dataclass(frozen=True)
class Work:
    """The work of a job: the stages train, store and evaluate, one after another.

    Each is the command of that name, with the submitted config. An evaluation is started once, on
    one node; of the other stages each rank is a process.
    """

    stages: tuple[str, ...] = ("train",)
    stored: str = ""  # the folder that `store` writes
    suite: str = ""  # the suite's name; its config is submitted, rather than a job's
    arguments: tuple[str, ...] = ()  # of `tandem evaluate`

    @property
    def trains(self) -> bool:
        """Whether its folder is a run's."""
        return "train" in self.stages

    @property
    def config(self) -> str:
        """The file of the submitted config."""
        return f"{self.suite or 'config'}.yaml"


TRAINING = Work()


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
    work: Work = TRAINING


def build(job: Job, cluster: ClusterConfig) -> str:
    """The text of the script.

    Raises LaunchError where a value cannot be quoted in an ``#SBATCH`` line: a line break or other
    unprintable character. Also raises it for a variable that the script itself uses, and for a
    Weights & Biases key, which others could read.
    """
    _refuse_unprintable(job, cluster)
    work = _work(job, cluster)
    supervisor = "\n".join(part.read_text(encoding="utf-8") for part in PARTS)
    _refuse_own_names(cluster, work + START + supervisor)
    text = "\n".join([_options(job, cluster), work, _environment(cluster), START])
    if f"{SECRET}=" in text:
        raise LaunchError(
            f"{SECRET}: the key would be readable in the script; run `wandb login` once, or export "
            "it in the shell that submits"
        )
    return text


def _options(job: Job, cluster: ClusterConfig) -> str:
    options = {
        "job-name": job.name,
        "nodes": cluster.nodes,
        **_tasks(cluster),
        **_gpus(cluster),
        "chdir": str(job.directory),
        "output": "/dev/null",  # the script opens its log itself
        "signal": f"B:USR1@{cluster.warning_seconds}",
        **({"array": f"0-{len(job.seeds) - 1}"} if job.seeds else {}),
    }
    requeue = "requeue" if _may_requeue(job, cluster) else "no-requeue"
    words = [f"--{name}={_escaped(text)}" for name, text in options.items()]
    words += [f"--{requeue}", *_site_options(cluster.sbatch, _escaped)]
    head = [
        "#!/bin/bash",
        f"# Job {job.name}, written by `tandem submit`. To submit it again when it has ended: "
        "sbatch THIS_FILE",
    ]
    return "\n".join([*head, *(f"#SBATCH {word}" for word in words)]) + "\n"


def _escaped(text: str) -> str:
    """A value in an ``#SBATCH`` line, where a backslash escapes even within single quotes."""
    return quote(text.replace(BACKSLASH, BACKSLASH * 2))


def _site_options(
    options: Mapping[str, str], quoted: Callable[[str], str] = str, left_out: Container[str] = ()
) -> list[str]:
    """Options of sbatch or srun as a cluster's YAML states them."""
    words = []
    for name, text in options.items():
        if text.lower() == LEFT_OUT or name in left_out:
            continue
        words.append(f"--{name}" if text.lower() in FLAG else f"--{name}={quoted(text)}")
    return words


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
    lines = [
        "# What runs",
        f"run={quote(str(job.run))}",
        f"submission={quote(str(job.submission))}",
        f"stages=({' '.join(job.work.stages)})",
        *(_array(stage, _command(job, cluster, stage)) for stage in job.work.stages),
        f"stored={quote(job.work.stored) if job.work.stored else ''}",
        _array("check", [*_program(job, cluster), "preflight"]),
        _array("srun", _srun(cluster)),
        _array("check_srun", _srun(cluster, RESHAPING)),
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
        lines.append("job=$SLURM_JOB_ID")
    else:
        lines += [
            # The task with the array's own number as its job id: for scontrol that means all tasks.
            "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
            f"seeds=({' '.join(map(str, job.seeds))})",
            "seed=${seeds[$SLURM_ARRAY_TASK_ID]}",
            "run+=-seed$seed",
            *(f'{stage}+=("seed=$seed" {_name_of_seed(job.name)})' for stage in job.work.stages),
        ]
    return "\n".join([*lines, "log=$run/logs/slurm-$SLURM_JOB_ID.log"]) + "\n"


def _command(job: Job, cluster: ClusterConfig, stage: str) -> list[str]:
    config = str(job.submission / job.work.config)
    words = [config]
    if stage == "evaluate":
        words = [*(["--suite", config] if job.work.suite else []), *job.work.arguments]
        if job.work.suite and not cluster.gpus:
            words += ["--nproc", str(cluster.ranks)]
    return [*_program(job, cluster), stage, *words]


def _program(job: Job, cluster: ClusterConfig) -> list[str]:
    """Tandem, of which no module is hidden by the user's, in whatever folder it starts."""
    return [*cluster.container, job.python, f"{job.submission}/code/tandem.py"]


def _environment(cluster: ClusterConfig) -> str:
    lines = [
        "# Where it runs: what the first node exports reaches every rank",
        f"unset {' '.join([*EXPORTED, *SHELLS_OWN])}",
        "export SLURM_EXPORT_ENV=ALL SRUN_EXPORT_ENV=ALL  # also after sbatch --export=NONE",
        'export PYTHONPATH="$submission/code${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1',
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"',
        'export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"',
        "",
        "# A line that fails ends the job, unless it says `|| true`",
        *_function("set_up", _set_up(cluster)),
        "",
        *_function("after", [f"may {quote(line)}" for line in cluster.after]),
        *_function("at_end", [f"may {quote(line)}" for line in cluster.at_end]),
    ]
    return "\n".join(lines) + "\n"


def _set_up(cluster: ClusterConfig) -> list[str]:
    uses_module = any(re.search(r"\bmodule\b", line) for line in cluster.before)
    lines = ["find_module"] if cluster.modules or uses_module else []
    lines += [f"must {quote(f'module load {quote(module)}')}" for module in cluster.modules]
    if cluster.venv:
        programs = f"{quote(cluster.venv)}/bin"
        lines += [f"must {quote(f'. {programs}/activate')}"]
        lines += [f"must {quote(f'[ -x {programs}/python ]')}"]
    if cluster.conda:
        lines.append("""must 'eval "$(conda shell.bash hook)"'""")
        lines.append(f"must {quote(f'conda activate {quote(cluster.conda)}')}")
    if cluster.interface:
        lines.append(f"export NCCL_SOCKET_IFNAME={quote(cluster.interface)}")
        lines.append(f"export GLOO_SOCKET_IFNAME={quote(cluster.interface)}")
    lines += [f"export {name}={quote(text)}" for name, text in cluster.variables.items()]
    return [*lines, *(f"must {quote(line)}" for line in cluster.before)]


def _function(name: str, lines: list[str]) -> list[str]:
    return [f"{name}() {{", *(f"  {line}" for line in lines or [":"]), "}"]


def _may_requeue(job: Job, cluster: ClusterConfig) -> bool:
    return cluster.requeue and not job.chained


def _srun(cluster: ClusterConfig, left_out: Container[str] = ()) -> list[str]:
    # When one rank fails, the others fail with it; --wait ends those that hang. With
    # --kill-on-bad-exit, the exit codes of the killed ranks would hide that of the first.
    return _site_options({"wait": "300", **cluster.srun}, left_out=left_out)


def _array(name: str, words: list[str]) -> str:
    return f"{name}=({' '.join(map(quote, words))})"


def _name_of_seed(name: str) -> str:
    """The override that names the run of $seed, in bash."""
    plain = f"name={name}-seed"
    with contextlib.suppress(configs.ConfigError):  # of a name in which a comment begins
        if configs.assigned([f"{plain}0"]) == {"name": f"{name}-seed0"}:
            return f'{quote(plain)}"$seed"'
    before, after = configs.assignment("name", f"{name}-seed\n").rsplit("\\n", 1)
    return f'{quote(before)}"$seed"{quote(after)}'


def _limits(cluster: ClusterConfig) -> Iterator[str]:
    """The caps on all starts together, empty for no limit: bash computes in whole numbers."""
    starts, hours = cluster.max_requeues, cluster.max_gpu_hours
    yield f"max_requeues={'' if starts is None else starts}"
    yield f"max_gpu_hours={'' if hours is None else f'{hours:g}'}"
    yield f"max_gpu_seconds={'' if hours is None else int(hours * 3600)}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _refuse_own_names(cluster: ClusterConfig, text: str) -> None:
    names = set(re.findall(r"(?:^|[ ;(])([a-z_]+)\+?=", text, re.MULTILINE))
    for name in names & cluster.variables.keys():
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
