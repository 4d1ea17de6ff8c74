"""A real SLURM cluster on one machine, for tests: Debian's daemons, one namespace per node.

Every node has its own network, hostname, process, mount and IPC namespaces, so that it can be
powered off or cut off from the others as a machine can. It is up in half a second. Needs root, and
``apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2 bindfs``.

    with RealSlurm(nodes=3) as slurm:
        job = slurm.run("sbatch", "--parsable", "job.sh").strip()
        slurm.wait_job(job, "COMPLETED")
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from cluster.ranks import reserved_port
from tests.slurm.slurm_conf import Layout
from tests.waiting import until

PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
PROGRAMS = (
    "slurmctld",
    "slurmd",
    "munged",
    "sbatch",
    "srun",
    "ip",
    "unshare",
    "nsenter",
    "setpriv",
)
UNLIMITED = ("State=UP", "MaxTime=INFINITE", "MaxNodes=UNLIMITED")  # what a partition is at first
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def why_not() -> str | None:
    """Why such a cluster cannot run here; None if it can."""
    if os.geteuid() != 0:
        return "a SLURM cluster of network namespaces needs root"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    return f"not installed: {', '.join(missing)}" if missing else None


class RealSlurm:
    def __init__(self, nodes: int = 3, gpus: int = 0, cgroups: bool = False) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.root = self.home  # where commands run
        self.tag = f"{os.getpid():x}{time.monotonic_ns() >> 20 & 0xFFF:x}"
        names = tuple(f"n{i + 1}" for i in range(nodes))
        network = _free_network()
        self.reserved = contextlib.ExitStack()  # its ports
        ports = [self.reserved.enter_context(reserved_port()) for _ in range(2)]
        self.layout = Layout(self.home, network, names, *ports, gpus=gpus, cgroups=cgroups)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.inits: dict[str, int] = {}  # the pid of each node's first process
        self.marked: set[str] = set()  # nodes that are not as they were when they were booted
        self.changed = False  # slurm.conf

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.layout.nodes

    @property
    def env(self) -> dict[str, str]:
        """The environment for SLURM's commands: this cluster, and nothing of the caller's."""
        prefixes = ("SLURM", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_")
        env = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
        return env | {"SLURM_CONF": str(self.layout.conf)}

    def __enter__(self) -> RealSlurm:
        try:
            self._up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.down()

    # What a test does

    def run(self, *command: str, timeout: float = 60) -> str:
        """The output of a SLURM command; if it fails, the error contains its output."""
        result = subprocess.run(
            command, env=self.env, cwd=self.root, capture_output=True, text=True, timeout=timeout
        )
        assert result.returncode == 0, f"{command}: {result.returncode}\n{result.stderr}"
        return result.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """SLURM's facts about a job: JobState, Restarts, NodeList, ..."""
        words = self.run("scontrol", "-o", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ends(self, job_id: str) -> list[str]:
        """How each start of a job ended, as sacct shows it; PENDING where it was requeued."""
        lines = self.run("sacct", "--completion", "-n", "-P", "-o", "jobid,state").splitlines()
        return [state for number, state in (line.split("|") for line in lines) if number == job_id]

    def wait_job(self, job_id: str, *states: str, timeout: float = 60) -> dict[str, str]:
        """Wait until a job is in one of `states` (any final one by default)."""
        wanted = states or FINAL
        until(lambda: self.job(job_id)["JobState"] in wanted, f"job {job_id} {wanted}", timeout)
        return self.job(job_id)

    def wait_nodes(self, state: str, *nodes: str, timeout: float = 40) -> None:
        def reached() -> bool:
            lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
            states = dict(line.split() for line in lines)
            return all(states.get(node) == state for node in nodes or self.nodes)

        until(reached, f"nodes to be {state}", timeout)

    def configure(self, **changes: object) -> None:
        """Change settings of slurm.conf until the cluster is repaired."""
        self.changed = bool(changes)
        self.layout.configure(changes)
        self.run("scontrol", "reconfigure")

    def power_off(self, node: str) -> None:
        """Kill everything on the node, the network first, so that its peers are not told."""
        self.cut_off(node)
        os.kill(self.inits.pop(node), signal.SIGKILL)
        for name in (f"slurmd/{node}", f"node/{node}"):
            self._end(name)
        self._unlink(self._link(node))

    def declare_down(self, node: str) -> None:
        """Tell SLURM at once, before it notices that the node is missing."""
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def cut_off(self, node: str) -> None:
        """Disconnect the node, which keeps running."""
        self.marked.add(node)
        _ip("link", "set", self._link(node), "down")

    def freeze_daemon(self, node: str) -> None:
        """Stop its slurmd from answering; what the node runs continues."""
        self.marked.add(node)
        pid = int((self.home / f"run/slurmd.{node}.pid").read_text())
        self.inside(node, "kill", "-STOP", str(pid))

    def pause_controller(self) -> None:
        """Let slurmctld answer nothing until it is resumed."""
        os.killpg(self.processes["slurmctld"].pid, signal.SIGSTOP)

    def resume_controller(self) -> None:
        os.killpg(self.processes["slurmctld"].pid, signal.SIGCONT)

    def inside(self, node: str, *command: str) -> None:
        """Run a command on a node."""
        self.marked.add(node)
        subprocess.run([*self._entry(node), *command], check=True, timeout=60)

    def cache_names(self, node: str, folder: Path, seconds: int) -> None:
        """Let a node answer from a cache which names a folder has, also which not, as NFS does."""
        times = f"entry_timeout={seconds},negative_timeout={seconds},attr_timeout=3"
        self.inside(node, "bindfs", "-o", times, str(folder), str(folder))

    def mend(self) -> None:
        """Restore the initial state: no jobs, every node idle."""
        self.run("scancel", "--me")
        if self.changed:
            self.configure()
        self.run("scontrol", "update", "partition=main", *UNLIMITED)
        for node in sorted(self.marked):
            if node in self.inits:
                self.power_off(node)
            self._boot(node)
            self._start_daemon(node)
        self.marked.clear()
        # A job that is cancelled as it starts may be told so only once, and again after a minute.
        until(lambda: not self.run("squeue", "-h"), "the jobs to end", 180)
        self.wait_nodes("idle")

    # How it is built

    def _up(self) -> None:
        bridge = f"sb{self.tag}"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self.layout.network}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        self.layout.write()
        self._start_munged()
        conf = str(self.layout.conf)
        # slurmctld starts only on a host that is called what SlurmctldHost says
        named = f'hostname ctl; mount --bind {self.layout.hosts} /etc/hosts; exec "$@"'
        inner = ["sh", "-c", named, "sh", "slurmctld", "-D", "-f", conf]
        self._start("slurmctld", "unshare", "--uts", "--mount", *inner)
        for node in self.nodes:
            self._boot(node)
        ping = ["scontrol", "ping"]
        until(
            lambda: (
                subprocess.run(ping, env=self.env, capture_output=True, timeout=60).returncode == 0
            ),
            "slurmctld",
        )
        for node in self.nodes:
            (self.home / "spool" / node).mkdir()
            self._start_daemon(node)
        self.wait_nodes("idle")

    def _start_daemon(self, node: str) -> None:
        daemon = ["slurmd", "-D", "-N", node, "-f", str(self.layout.conf)]
        self._start(f"slurmd/{node}", *self._entry(node), *daemon)

    def _start_munged(self) -> None:
        run = self.home / "run"
        self._start(
            "munged",
            *("munged", "-F", f"--key-file={self.home}/etc/munge.key"),
            *(f"--socket={run}/munge.sock", f"--pid-file={run}/munged.pid"),
            *(f"--log-file={self.home}/log/munged.log", f"--seed-file={run}/munged.seed"),
            "--num-threads=4",
        )
        until((run / "munge.sock").exists, "munged's socket")

    def _boot(self, node: str) -> None:
        """The node's namespaces, with an idle first process, and its network."""
        ready = self.home / f"run/{node}.ready"
        first = (
            f"hostname {node}; mount --bind {self.layout.hosts} /etc/hosts; "
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm; ip link set lo up; "
            f"touch {ready}; while :; do sleep 3600; done"
        )
        spaces = ("--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc")
        self._start(f"node/{node}", "unshare", *spaces, "--kill-child=KILL", "sh", "-c", first)
        until(ready.exists, f"namespaces of {node}")
        ready.unlink()
        outer = self.processes[f"node/{node}"].pid
        children = Path(f"/proc/{outer}/task/{outer}/children").read_text()
        self.inits[node] = init = int(children.split()[0])
        link = self._link(node)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(init))
        _ip("link", "set", link, "master", f"sb{self.tag}", "up")
        inner = ["nsenter", "-t", str(init), "-n", "--", "ip"]
        address = f"{self.layout.address(node)}/24"
        for words in (["addr", "add", address, "dev", "eth0"], ["link", "set", "eth0", "up"]):
            subprocess.run([*inner, *words], check=True, timeout=60)

    def _entry(self, node: str) -> list[str]:
        return ["nsenter", "-t", str(self.inits[node]), "-n", "-u", "-m", "-p", "-i", "--"]

    def _link(self, node: str) -> str:
        return f"sv{self.tag}{self.nodes.index(node)}"

    def _unlink(self, link: str) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # gone with its node
            _ip("link", "del", link)

    def _start(self, name: str, *command: str) -> None:
        with open(self.home / "log" / f"{name.replace('/', '.')}.out", "ab") as out:
            self.processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # no daemon outlives the tests
                **{"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out},
                start_new_session=True,
                cwd=self.home,
                env=self.env | {"PATH": PATH},
            )

    def _end(self, name: str) -> None:
        process = self.processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait(60)

    def down(self) -> None:
        for node in list(self.inits):
            self.power_off(node)
        for name in list(self.processes):
            self._end(name)
        self._unlink(f"sb{self.tag}")
        self.reserved.close()
        shutil.rmtree(self.home, ignore_errors=True)


def requeue_soon(slurm: RealSlurm, job: str, restarts: int) -> None:
    """Start a job without SLURM's delay after its requeue number `restarts`."""

    def requeued() -> bool:
        facts = slurm.job(job)
        return facts["Restarts"] == str(restarts) and facts["JobState"] in ("PENDING", "RUNNING")

    until(requeued, "the requeue", 200)
    if slurm.job(job)["JobState"] == "PENDING":  # a slow machine may have let the delay pass
        time.sleep(1.5)  # sooner, and nodes take it for the job whose credential was just revoked
        slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")


def _ip(*arguments: str) -> str:
    command = ["ip", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


def _free_network() -> str:
    """The first three numbers of a private network that this machine does not use."""
    used = _ip("-4", "-o", "addr") + _ip("-4", "route")
    candidates = (f"10.{201 + n // 256}.{n % 256}" for n in range(os.getpid() % 4096, 1 << 13))
    return next(network for network in candidates if f"{network}." not in used)
