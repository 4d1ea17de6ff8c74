"""What a partition grants, compared with what a job asks for.

SLURM takes a job that no partition will ever run, and lets it wait for good; so this is looked up
before a job is handed over. A QOS may grant more than its partition: with one, SLURM decides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from cluster.config import ClusterConfig
from cluster.errors import LaunchError
from cluster.scheduler import slurm_command

UNLIMITED = ("UNLIMITED", "INFINITE")

Partition = dict[str, str]  # as scontrol shows it: PartitionName, MaxTime, MaxNodes, ...


def refuse_never_granted(cluster: ClusterConfig) -> None:
    """Raise LaunchError for a time or a number of nodes that no partition asked for grants."""
    partitions = _asked_for(cluster, _partitions())
    refusals = [_refusal(cluster, partition) for partition in partitions]
    if refusals and all(refusals):
        raise LaunchError(str(refusals[0]))


def seconds(text: str) -> int | None:
    """A time as sbatch takes it ("30", "2:00:00", "1-12"), in seconds; None for no limit.

    Raises ValueError for what is none.
    """
    if text.upper() in UNLIMITED:
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, secs = [*parts, 0, 0][:3]
    elif len(parts) < 3:
        hours, minutes, secs = [0, *parts, 0][:3]
    else:
        hours, minutes, secs = parts
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + secs


def _partitions() -> list[Partition]:
    try:
        lines = slurm_command("scontrol", "-o", "show", "partition").splitlines()
    except LaunchError:
        return []  # sbatch has the better words
    return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines]


def _asked_for(cluster: ClusterConfig, partitions: Sequence[Partition]) -> list[Partition]:
    """Those that the job may run in; sbatch lets its environment overrule the script."""
    names = os.environ.get("SBATCH_PARTITION") or cluster.sbatch.get("partition")
    if names is None:
        return [one for one in partitions if one.get("Default") == "YES"]
    return [one for one in partitions if one.get("PartitionName") in names.split(",")]


def _refusal(cluster: ClusterConfig, partition: Partition) -> str | None:
    """Why the partition will never run such a job, if so."""
    name = partition["PartitionName"]
    least, most = cluster.node_counts[0], cluster.node_counts[-1]
    there = int(partition["TotalNodes"])
    if least > there:
        return f"nodes: {cluster.nodes} are asked for, but partition {name} has {there}"
    if "qos" in cluster.sbatch or "SBATCH_QOS" in os.environ:
        return None
    if partition["MaxNodes"].isdigit() and least > int(partition["MaxNodes"]):
        granted = partition["MaxNodes"]
        return f"nodes: {cluster.nodes}, but partition {name} grants a job at most {granted}"
    if partition["MinNodes"].isdigit() and most < int(partition["MinNodes"]):
        granted = partition["MinNodes"]
        return f"nodes: {cluster.nodes}, but partition {name} grants a job no fewer than {granted}"
    return _time_refusal(cluster, partition)


def _time_refusal(cluster: ClusterConfig, partition: Partition) -> str | None:
    asked = os.environ.get("SBATCH_TIMELIMIT") or cluster.sbatch.get("time")
    if asked is None or "time-min" in cluster.sbatch:
        return None
    try:
        wanted, granted = seconds(asked), seconds(partition["MaxTime"])
    except ValueError:
        return None  # sbatch has the better words
    if granted is None or (wanted is not None and wanted <= granted):
        return None
    name, most = partition["PartitionName"], partition["MaxTime"]
    return f"sbatch.time: {asked}, but partition {name} grants a job at most {most}"
