"""How a job runs on one SLURM cluster: the schema of ``configs/cluster/*.yaml``.

A config may set any option of sbatch and srun but those of the script. Unknown ones are passed on,
since only a site's own sbatch knows them: releases and plugins add some, and ``sbatch --help``
leaves out a fifth of what it takes. It refuses a misspelt one by itself.
"""

import collections
import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from cluster.ranks import EXPORTED, PORT
from configs.errors import OptionError
from configs.interpolation import resolved
from configs.rules import GIGABYTES, INDEX, PATH, VERBATIM, Matches, Range, Unit, positive
from configs.section import Refusal, Section
from configs.typed import hints_of, options_of

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


# Variables that SLURM or the launcher sets for each rank, or that are read-only in bash.
LAUNCHERS = re.compile(
    rf"{'|'.join(EXPORTED)}|{PORT}|"
    r"SLURM_(JOB|STEP|ARRAY|NTASKS|TASKS|NNODES|PROCID|LOCALID|NODEID|RESTART)(_\w+)?|UID|EUID|PPID|BASHOPTS|SHELLOPTS|BASH_VERSINFO"
)


OptionName = Annotated[str, Matches(r"[a-z][a-z0-9-]+", "the long name of an option")]


@dataclass
class ClusterConfig(Section):
    """Everything specific to one cluster, so that a job's config runs on any of them."""

    nodes: Annotated[
        str,
        Matches(r"[1-9]\d*(-[1-9]\d*)?", "a number, or a range such as 2-4"),
        "The number of nodes, or a range MIN-MAX.",
    ] = "1"
    gpus_per_node: Annotated[
        str,
        Matches(r"([A-Za-z][\w.-]*:)?\d+", "a number, or one of a kind such as a100:8"),
        "GPUs on each node; some sites need `sbatch.gres` instead.",
    ] = "0"
    ranks_per_node: Annotated[
        int, Range(1, 2**20), "Ranks on each node without GPUs; with GPUs, one rank per GPU."
    ] = 1
    sbatch: Annotated[
        dict[OptionName, str],
        "Options of sbatch by their long names. For an option without a value write `true` "
        "or an empty string; `false` removes an option that a `base` sets.",
    ] = field(default_factory=dict)
    srun: Annotated[dict[OptionName, str], "Options of srun, written as in `sbatch`."] = field(
        default_factory=dict
    )
    warning_seconds: Annotated[
        int,
        Range(1, 65535),  # the most that sbatch's --signal takes
        Unit("s"),
        "How long before the time limit the ranks are signalled to save.",
    ] = 300
    requeue: Annotated[bool, "Requeue the job when it is interrupted."] = True
    max_requeues_without_progress: Annotated[
        int, INDEX, "The job fails after this many requeues in a row without a new step."
    ] = 3
    max_requeues: Annotated[
        int | None,
        INDEX,
        "The most requeues of one submission or chain, for any reason; null: no "
        "limit. Submitting the run again restarts the count.",
    ] = 100
    max_gpu_hours: Annotated[
        float | None,
        positive(1e9),
        Unit("GPU hours"),
        "The budget of all starts of one submission or chain; when it is spent, the job saves "
        "and ends.",
    ] = None
    preflight: Annotated[bool, "Check every node before the ranks start."] = True
    min_free_gb: Annotated[
        float, GIGABYTES, Unit("GB"), "Free space that the preflight requires in the run folder."
    ] = 10.0
    modules: Annotated[list[str], "Environment modules to load."] = field(default_factory=list)
    venv: Annotated[str, PATH, "A virtual environment to activate."] = ""
    conda: Annotated[str, PATH, "A conda environment to activate."] = ""
    container: Annotated[
        list[str], "A prefix of the ranks' command: `[apptainer, exec, image.sif]`."
    ] = field(default_factory=list)
    python: Annotated[
        str,
        PATH,
        "The ranks' Python interpreter. Empty: `python` if `venv`, `conda` or `container` "
        "is set, otherwise the interpreter that submits.",
    ] = ""
    interface: Annotated[
        str,
        Matches(r"[\w.=^,:-]*", "the name of an interface, such as ib0"),
        "The network interface for NCCL and gloo, if a node has several.",
    ] = ""
    variables: Annotated[
        dict[Annotated[str, Matches(r"[A-Za-z_]\w*", "a variable's name")], str],
        "Environment variables of the ranks, taken literally. Where the shell is to replace "
        "`$NAME` in a value, write `export` lines in `before`.",
    ] = field(default_factory=dict)
    before: Annotated[
        list[str], VERBATIM, "Shell commands on the first node, before the ranks start."
    ] = field(default_factory=list)
    after: Annotated[
        list[str], VERBATIM, "Shell commands after the ranks end, in every attempt."
    ] = field(default_factory=list)
    at_end: Annotated[
        list[str], VERBATIM, "Shell commands that run once, when the run has ended."
    ] = field(default_factory=list)

    def conflicts(self) -> Iterator[Refusal]:
        if not self.node_counts:
            yield "nodes", f"{self.nodes} must be a range MIN-MAX, such as 2-4"
        for name in filter(LAUNCHERS.fullmatch, self.variables):
            yield f"variables.{name}", "is set by the launcher; leave it out"
        for section, options in (("sbatch", self.sbatch), ("srun", self.srun)):
            for name in options:
                if why := refusal(section, name):
                    yield f"{section}.{name}", why
        yield from self._conflicts_of_gpus()
        threads = self.sbatch.get("cpus-per-task", "1")
        if not re.fullmatch(r"[1-9]\d*", threads):
            yield "sbatch.cpus-per-task", f"must be a number, not {threads!r}"

    def _conflicts_of_gpus(self) -> Iterator[Refusal]:
        try:
            gpus_in_gres(self.sbatch.get("gres", ""))
        except ValueError as error:
            yield "sbatch.gres", str(error)
            return
        if self.asks_by_gres and self._gpus_by_count:
            yield (
                "sbatch.gres",
                "gpus_per_node requests GPUs as well; set only one of them (--gpus-per-node 0)",
            )
        if self.max_gpu_hours is not None and not self.gpus:
            yield "max_gpu_hours", "needs gpus_per_node"

    @property
    def has_own_python(self) -> bool:
        """Whether the ranks run another Python than the process that submits."""
        return bool(self.venv or self.conda or self.container or "container-image" in self.srun)

    @property
    def gpus(self) -> int:
        """GPUs on each node, of any type, from `gpus_per_node` or `sbatch.gres`."""
        return self._gpus_by_count or gpus_in_gres(self.sbatch.get("gres", ""))

    @property
    def asks_by_gres(self) -> bool:
        """Whether ``sbatch.gres`` requests the GPUs, for sites without ``--gpus-per-node``."""
        return gpus_in_gres(self.sbatch.get("gres", "")) > 0

    @property
    def _gpus_by_count(self) -> int:
        return int(self.gpus_per_node.rpartition(":")[2])

    @property
    def node_counts(self) -> range:
        """Every number of nodes that SLURM may allocate."""
        least, _, most = self.nodes.partition("-")
        return range(int(least), int(most or least) + 1)

    @property
    def ranks(self) -> int:
        """Ranks on each node: one per GPU where there are GPUs."""
        return self.gpus or self.ranks_per_node


def with_options(config: ClusterConfig, arguments: Sequence[str]) -> ClusterConfig:
    """Apply command-line options: ours by their key, any other to sbatch.

    ``--nodes 4 --partition=debug --exclusive`` sets ``nodes`` and adds two sbatch options. The
    ``--container-*`` options of NVIDIA's Pyxis go to srun: only the ranks run in the image, since
    the script needs SLURM's commands. Raises OptionError for an argument that is not an option, and
    for an invalid value.
    """
    ours: dict[str, Any] = {}
    sbatch, srun = dict(config.sbatch), dict(config.srun)
    kinds, pairs = _kinds(), _pairs(arguments)
    for name, text in pairs:
        kind = kinds.get(name.replace("-", "_"))
        if kind:
            ours[name.replace("-", "_")] = _converted(name, text, kind)
        elif name.startswith("container-"):
            srun[name] = text
        else:
            sbatch[name] = text
    try:
        ours = resolved(ours, ClusterConfig)  # as in YAML, paths may have ~ and variables
        return dataclasses.replace(config, sbatch=sbatch, srun=srun, **ours)
    except ValueError as error:
        key, colon, problem = str(error).partition(": ")
        option = key.rpartition(".")[2].replace("_", "-")
        is_given = option in dict(pairs)
        raise OptionError(f"--{option}{colon}{problem}" if is_given else str(error)) from error


def _pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The options and their values; empty values of those that have none."""
    pairs, words = [], collections.deque(arguments)
    while words:
        argument = words.popleft()
        if not argument.startswith("--") or argument == "--":
            raise OptionError(f"{argument!r} is not an option; write --name value, or key=value")
        name, equals, text = argument[2:].partition("=")
        if not equals and words and not words[0].startswith("--"):
            text = words.popleft()
        pairs.append((name, text))
    return pairs


def _kinds() -> dict[str, type]:
    """The type of each key that a command-line option may set."""
    hints = hints_of(typing.cast(Any, ClusterConfig))
    kinds = {name: options_of(hint)[0] for name, hint in hints.items()}
    return {name: kind for name, kind in kinds.items() if kind in (bool, str, int, float)}


def _converted(name: str, text: str, kind: type) -> str | int | float | bool:
    if kind is bool:
        words = {"true": True, "": True, "false": False}
        if text.lower() not in words:
            raise OptionError(f"--{name} {text}: must be true or false")
        return words[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise OptionError(f"--{name} {text}: must be a number") from None
