"""How a job runs on one SLURM cluster: the schema of ``configs/cluster/*.yaml``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from cluster.errors import LaunchError
from cluster.ranks import EXPORTED
from cluster.sbatch_options import OWN, gpus_in_gres
from configs.bounds import GIGABYTES, INDEX, positive, require_bounds

# Set for each rank, by SLURM or from what it sets; or read-only in bash.
LAUNCHERS = re.compile(
    rf"{'|'.join(EXPORTED)}|SLURM_(JOB|STEP|ARRAY|NTASKS|TASKS|NNODES|PROCID|LOCALID|NODEID|RESTART)"
    r"(_\w+)?|UID|EUID|PPID|BASHOPTS|SHELLOPTS|BASH_VERSINFO"
)


@dataclass
class ClusterConfig:
    """Everything about a cluster that a job's own config should not need to know.

    ``sbatch`` and ``srun`` hold any option of theirs by its long name: true, or nothing in quotes,
    for one that takes no value, false to leave out what a ``base`` has.
    """

    nodes: str = "1"  # or the least and the most: 2-4
    gpus_per_node: str = "0"  # or of one kind: a100:8; or say sbatch.gres
    ranks_per_node: int = 1  # where there are no GPUs; otherwise one rank per GPU
    sbatch: dict[str, str] = field(default_factory=dict)
    srun: dict[str, str] = field(default_factory=dict)
    warning_seconds: int = 300  # how long before the time limit the ranks are told to save
    requeue: bool = True
    fruitless_requeues: int = 3  # in a row, each without a new step, before the job gives up
    max_requeues: int | None = None  # in all, whatever for
    max_gpu_hours: float | None = None  # of all starts together; when they are used up, it saves
    preflight: bool = True
    min_free_gb: float = 10.0  # in the run folder
    modules: list[str] = field(default_factory=list)
    venv: str = ""
    conda: str = ""
    container: list[str] = field(default_factory=list)  # a prefix: [apptainer, exec, image.sif]
    python: str = ""  # the submitter's own, or `python` where an environment is named above
    interface: str = ""  # over which NCCL and gloo talk, where a node has several: ib0
    variables: dict[str, str] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)  # shell commands on the first node
    after: list[str] = field(default_factory=list)  # when the ranks have ended, at each start
    at_end: list[str] = field(default_factory=list)  # when the run has ended for good, once

    def __post_init__(self) -> None:
        """Refuse what cannot work, naming the key."""
        if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)?", self.nodes):
            raise ValueError(f"nodes: {self.nodes!r} is neither a number nor a range such as 2-4")
        if not self.node_counts:
            raise ValueError(f"nodes: {self.nodes} is a range from its least to its most: 2-4")
        if not re.fullmatch(r"([A-Za-z][\w.-]*:)?\d+", self.gpus_per_node):
            kinds = "a number, nor one of a kind such as a100:8"
            raise ValueError(f"gpus_per_node: {self.gpus_per_node!r} is neither {kinds}")
        require_bounds(self, min_free_gb=GIGABYTES, ranks_per_node=(1, 2**20))
        require_bounds(self, warning_seconds=(1, 10**9), fruitless_requeues=INDEX)
        if not re.fullmatch(r"[\w.=^,:-]*", self.interface):
            raise ValueError(f"interface: {self.interface!r} is not the name of one, such as ib0")
        self._require_caps_that_can_be_kept()
        for name in self.variables:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"variables: {name!r} is not a name for an environment variable")
            if LAUNCHERS.fullmatch(name):
                raise ValueError(f"variables.{name}: is set by the launcher; leave it out")
        for section, options in (("sbatch", self.sbatch), ("srun", self.srun)):
            for name in options:
                if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
                    raise ValueError(f"{section}: {name!r} is not the long name of an option")
                if name in OWN[section]:
                    raise ValueError(f"{section}.{name}: cannot be set: {OWN[section][name]}")
        if self.asks_by_gres and int(self.gpus_per_node.rpartition(":")[2]):
            raise ValueError(
                "sbatch.gres: gpus_per_node asks for GPUs as well; leave one of the two out "
                "(--gpus-per-node 0)"
            )
        if not re.fullmatch(r"[1-9]\d*", self.sbatch.get("cpus-per-task", "1")):
            raise ValueError(f"sbatch.cpus-per-task: {self.sbatch['cpus-per-task']} is no number")

    def _require_caps_that_can_be_kept(self) -> None:
        require_bounds(self, max_requeues=INDEX, max_gpu_hours=positive(1e9))
        if self.max_gpu_hours is not None and not self.gpus:
            raise ValueError("max_gpu_hours: needs gpus_per_node")

    @property
    def has_own_python(self) -> bool:
        """Whether the ranks have another `python` than who submits."""
        return bool(self.venv or self.conda or self.container or "container-image" in self.srun)

    @property
    def gpus(self) -> int:
        """GPUs on each node, of whatever kind, whichever option asks for them."""
        return int(self.gpus_per_node.rpartition(":")[2]) or self._gpus_in_gres

    @property
    def asks_by_gres(self) -> bool:
        """Whether ``sbatch.gres`` asks for GPUs, for sites that know no ``--gpus-per-node``."""
        return self._gpus_in_gres > 0

    @property
    def _gpus_in_gres(self) -> int:
        try:
            return gpus_in_gres(self.sbatch.get("gres", ""))
        except ValueError as error:
            raise ValueError(f"sbatch.gres: {error}") from None

    @property
    def node_counts(self) -> range:
        """The numbers of nodes that the job may get."""
        least, _, most = self.nodes.partition("-")
        return range(int(least), int(most or least) + 1)

    @property
    def ranks(self) -> int:
        """Ranks on each node: one per GPU where there are GPUs."""
        return self.gpus or self.ranks_per_node


def with_options(config: ClusterConfig, arguments: Sequence[str]) -> ClusterConfig:
    """Apply command-line options: ours by their key, any other to sbatch.

    ``--nodes 4 --partition=debug --exclusive`` sets ``nodes`` and adds two sbatch options. Those of
    NVIDIA's Pyxis, ``--container-image`` and its like, go to srun: the ranks run in the image, not
    the script, which needs SLURM. Raises LaunchError for an argument that is no option, or for a
    value that does not fit.
    """
    ours: dict[str, Any] = {}
    sbatch, srun = dict(config.sbatch), dict(config.srun)
    kinds = _kinds()
    for name, text in _pairs(arguments):
        kind = kinds.get(name.replace("-", "_"))
        if kind:
            ours[name.replace("-", "_")] = _converted(name, text, kind)
        elif name.startswith("container-"):
            srun[name] = text
        else:
            sbatch[name] = text
    try:
        return dataclasses.replace(config, sbatch=sbatch, srun=srun, **ours)
    except ValueError as error:
        raise LaunchError(str(error)) from error


def _pairs(arguments: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    taken = False
    for index, argument in enumerate(arguments):
        if taken:
            taken = False
            continue
        if not argument.startswith("--") or argument == "--":
            raise LaunchError(f"{argument!r} is not an option; write --name value, or key=value")
        name, equals, text = argument[2:].partition("=")
        following = arguments[index + 1] if index + 1 < len(arguments) else "--"
        if not equals and not following.startswith("--"):
            text, taken = following, True
        pairs.append((name, text))
    return pairs


def _kinds() -> dict[str, type]:
    """What the value of each key is that an option may set."""
    kinds = {kind.__name__: kind for kind in (bool, str, int, float)}
    names = {one.name: str(one.type).removesuffix(" | None") for one in fields(ClusterConfig)}
    return {name: kinds[kind] for name, kind in names.items() if kind in kinds}


def _converted(name: str, text: str, kind: type) -> str | int | float | bool:
    if kind is bool:
        words = {"true": True, "": True, "false": False}
        if text.lower() not in words:
            raise LaunchError(f"--{name} {text}: true or false is expected")
        return words[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise LaunchError(f"--{name} {text}: a number is expected") from None
