"""Compare a job's request with its partition's limits, before it is submitted.

SLURM accepts a job that exceeds its partition's limits, and leaves it pending forever. A QOS may
override its partition's limits: where the job names a QOS, SLURM decides.
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
    """Raise LaunchError where the time or nodes exceed the limits of every requested partition.

    Also raises it where every partition gives less time than the ranks need to save.
    """
    partitions = _asked_for(cluster, _partitions())
    for refuse in (_refusal, _refusal_of_warning):
        refusals = [refuse(cluster, partition) for partition in partitions or [{}]]
        if all(refusals):
            raise LaunchError(str(refusals[0]))


def seconds(text: str) -> int | None:
    """Parse a time as sbatch does ("30", "2:00:00", "1-12") into seconds; None for no limit ("0").

    Raises ValueError for any other text.
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
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + secs or None


def _partitions() -> list[Partition]:
    try:
        lines = slurm_command("scontrol", "-o", "show", "partition").splitlines()
    except LaunchError:
        return []  # sbatch reports this better
    return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines]


def _asked_for(cluster: ClusterConfig, partitions: Sequence[Partition]) -> list[Partition]:
    """The partitions that the job may run in; for sbatch, the environment overrides the script."""
    names = os.environ.get("SBATCH_PARTITION") or cluster.sbatch.get("partition")
    if names is None:
        return [partition for partition in partitions if partition.get("Default") == "YES"]
    return [
        partition for partition in partitions if partition.get("PartitionName") in names.split(",")
    ]


def _refusal(cluster: ClusterConfig, partition: Partition) -> str | None:
    """Why the partition would never start this job; None where it may."""
    if not partition:
        return None
    name = partition["PartitionName"]
    least, most = cluster.node_counts[0], cluster.node_counts[-1]
    available = int(partition["TotalNodes"])
    if least > available:
        return f"nodes: {cluster.nodes} requested, but partition {name} has {available}"
    if "qos" in cluster.sbatch or "SBATCH_QOS" in os.environ:
        return None
    if partition["MaxNodes"].isdigit() and least > int(partition["MaxNodes"]):
        granted = partition["MaxNodes"]
        return f"nodes: {cluster.nodes} requested, but partition {name} allows at most {granted}"
    if partition["MinNodes"].isdigit() and most < int(partition["MinNodes"]):
        granted = partition["MinNodes"]
        return f"nodes: {cluster.nodes} requested, but partition {name} requires at least {granted}"
    return _time_refusal(cluster, partition)


def _time_asked(cluster: ClusterConfig) -> str | None:
    return os.environ.get("SBATCH_TIMELIMIT") or cluster.sbatch.get("time")


def _refusal_of_warning(cluster: ClusterConfig, partition: Partition) -> str | None:
    """Why each start would be told to save before it has trained; None where it has time."""
    asked = cluster.sbatch.get("time-min") or _time_asked(cluster)
    default = partition.get("DefaultTime", "NONE")
    limit = asked or (partition.get("MaxTime") if default == "NONE" else default) or "UNLIMITED"
    try:
        granted = seconds(limit)
    except ValueError:
        return None  # sbatch reports this better
    if granted is None or granted > cluster.warning_seconds:
        return None
    source = "sbatch.time" if asked else f"partition {partition['PartitionName']}"
    return (
        f"warning_seconds: the ranks would save {cluster.warning_seconds} s before the time limit "
        f"of {limit} ({source}), before they have trained; set it lower, or ask for more time"
    )


def _time_refusal(cluster: ClusterConfig, partition: Partition) -> str | None:
    asked = _time_asked(cluster)
    if asked is None or "time-min" in cluster.sbatch:
        return None
    try:
        wanted, granted = seconds(asked), seconds(partition["MaxTime"])
    except ValueError:
        return None  # sbatch reports this better
    if granted is None or (wanted is not None and wanted <= granted):
        return None
    name, most = partition["PartitionName"], partition["MaxTime"]
    return f"sbatch.time: {asked} requested, but partition {name} allows at most {most}"
