"""The files of a small SLURM cluster whose nodes are network namespaces of this machine."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """The folders of a cluster, and the names and features of its nodes."""

    root: Path
    network: str  # the first three numbers of its addresses
    nodes: tuple[str, ...]
    controller_port: int
    node_port: int
    cpus: int = 4
    gpus: int = 0  # pretended: /dev/null under another name
    cgroups: bool = False  # memory is limited by the kernel

    @property
    def conf(self) -> Path:
        return self.root / "etc/slurm.conf"

    @property
    def hosts(self) -> Path:
        return self.root / "etc/hosts"

    def address(self, node: str) -> str:
        return f"{self.network}.{11 + self.nodes.index(node)}"

    def write(self) -> None:
        for name in ("etc", "state", "spool", "log", "run", "dev"):
            (self.root / name).mkdir(parents=True)
        for folder in (self.root, self.root / "run"):
            folder.chmod(0o755)  # munged: no write permission for others on the way to its socket
        key = self.root / "etc/munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        hosts = ["127.0.0.1 localhost", f"{self.network}.1 ctl"]
        hosts += [f"{self.address(node)} {node}" for node in self.nodes]
        self.hosts.write_text("\n".join(hosts) + "\n")
        self.configure({})
        if self.gpus:
            self._write_gpus()
        if self.cgroups:
            lines = ["CgroupPlugin=cgroup/v1", "ConstrainRAMSpace=yes", "ConstrainSwapSpace=yes"]
            (self.root / "etc/cgroup.conf").write_text("\n".join(lines) + "\n")

    def configure(self, changes: Mapping[str, object]) -> None:
        """Write slurm.conf, with some of its settings changed."""
        lines = [line for line in self._conf() if line.partition("=")[0] not in changes]
        lines += [f"{name}={value}" for name, value in changes.items()]
        self.conf.write_text("\n".join(lines) + "\n")

    def _write_gpus(self) -> None:
        devices = [self.root / f"dev/nvidia{i}" for i in range(self.gpus)]
        for device in devices:
            device.symlink_to("/dev/null")  # it must be a device, and a link to one is enough
        names = ",".join(self.nodes)
        files = ",".join(map(str, devices))
        (self.root / "etc/gres.conf").write_text(f"NodeName={names} Name=gpu File={files}\n")

    def _conf(self) -> list[str]:
        root, user = self.root, pwd.getpwuid(os.getuid()).pw_name
        gres = f" Gres=gpu:{self.gpus}" if self.gpus else ""
        lines = [
            "ClusterName=test",
            f"SlurmctldHost=ctl({self.network}.1)",
            f"SlurmctldPort={self.controller_port}",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            # cred_expire is also how long a requeued job waits (120 s by default)
            f"AuthInfo=socket={root}/run/munge.sock,cred_expire=5",
            f"StateSaveLocation={root}/state",
            f"SlurmdSpoolDir={root}/spool/%n",
            f"SlurmctldPidFile={root}/run/slurmctld.pid",
            f"SlurmdPidFile={root}/run/slurmd.%n.pid",
            f"SlurmctldLogFile={root}/log/slurmctld.log",
            f"SlurmdLogFile={root}/log/slurmd.%n.log",
            "MailProg=/bin/true",
            "ProctrackType=proctrack/linuxproc",
            f"TaskPlugin=task/{'cgroup' if self.cgroups else 'none'}",
            "JobAcctGatherType=jobacct_gather/none",
            "MpiDefault=none",
            "SwitchType=switch/none",
            "AccountingStorageType=accounting_storage/none",
            "JobCompType=jobcomp/filetxt",
            f"JobCompLoc={root}/log/ends",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core_Memory",
            "DefMemPerCPU=100",
            "SlurmdParameters=config_overrides",  # believe the CPUs and memory stated below
            "SchedulerType=sched/backfill",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0",
            "ReturnToService=2",
            "SlurmdTimeout=5",
            "KillWait=30",
            "MessageTimeout=5",
            "TCPTimeout=2",
            "CompleteWait=0",
            "InactiveLimit=0",
            "MinJobAge=3600",
            "JobRequeue=1",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
        ]
        if self.gpus:
            lines.append("GresTypes=gpu")
        for node in self.nodes:
            lines.append(
                f"NodeName={node} NodeHostname={node} NodeAddr={self.address(node)} "
                f"Port={self.node_port} Sockets=1 CoresPerSocket={self.cpus} ThreadsPerCore=1 "
                f"RealMemory=4000{gres} State=UNKNOWN"
            )
        every = "Nodes=ALL MaxTime=INFINITE State=UP"
        lines.append(f"PartitionName=main {every} Default=YES PriorityTier=1 GraceTime=20")
        lines.append(f"PartitionName=urgent {every} PriorityTier=2 PreemptMode=OFF")
        return lines
