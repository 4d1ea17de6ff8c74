"""The batch script of a job, with shell scripts as stand-ins for `srun` and `scontrol`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.script import TRAINING, Job, build
from cluster.slurm import SOURCE
from tests.waiting import SECONDS, until

FAKES = {
    "srun": """
        case "$*" in
        *"tandem.py preflight"*) eval "${PREFLIGHT:-echo ok n1; echo ok n2}" ;;
        *) eval "$TRAIN" ;;
        esac
    """,
    "scontrol": """
        echo "$*" >>"$CALLS"
        NAMES='s/.*hostnames//; s/\\[\\(.\\)-\\(.\\)\\]/{\\1..\\2}/; s/,/ /g'
        eval "$CONTROLLER"
        case "$*" in
        requeue*) echo "$REFUSAL" >&2; [ -z "$REFUSAL" ] ;;
        *hostnames*) eval "printf '%s\\n' $(sed "$NAMES" <<<"$*")" ;;
        *"show job"*) echo "JobId=7 Reason=${REASON:-None} ExcNodeList=${EXCLUDED:-(null)} End=1" ;;
        esac
    """,
    "scancel": 'echo "scancel $*" >>"$CALLS"',
    "sbatch": """
        echo "sbatch $*" >>"$CALLS"
        eval "$SBATCH"
    """,
}

STOP = "mkdir -p requests; touch requests/stop.json"

# What ranks do in the run folder: note a step, and say at the end of an attempt how it went.
RANKS = """
step() { echo "{\\"step\\": $1}" >>metrics.jsonl; }
attempt() { # JSON: its record has the job and the restart, and whatever is given
    mkdir -p attempts
    local restart=${SLURM_RESTART_COUNT:-0}
    echo "{\\"job\\": \\"$SLURM_JOB_ID\\", \\"restart\\": $restart$1}" >attempts/000009.json
}
finish() { attempt ', "finished": true'; exit 0; }
"""


class Run:
    """A run folder, and the consecutive starts of its job."""

    def __init__(self, folder: Path, **cluster) -> None:
        self.folder = folder
        self.submission = folder / "run/submissions/001"
        self.submission.mkdir(parents=True)
        (self.submission / "code").symlink_to(SOURCE)
        (folder / "bin").mkdir()
        for name, text in FAKES.items():
            (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}")
            (folder / "bin" / name).chmod(0o755)
        self.chained = cluster.pop("chained", False)
        self.work = cluster.pop("work", TRAINING)
        self.cluster = ClusterConfig(**({"nodes": "2", "preflight": False} | cluster))

    def start(self, train: str, restart: int = 0, **env: str) -> subprocess.Popen:
        run = self.folder / "run"
        chained = self.chained
        job = Job("j", run, self.submission, self.folder, "python", (), chained, self.work)
        script = self.folder / "job.sbatch"
        script.write_text(build(job, self.cluster))
        env = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            "TRAIN": f"cd {run}\n{RANKS}\n{train}",
            "SLURM_JOB_ID": "7",
            "SLURM_NNODES": "2",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURMD_NODENAME": "n1",
            **env,
        }
        if restart:
            env["SLURM_RESTART_COUNT"] = str(restart)
        options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen(["bash", script], env=env, cwd=self.folder, **options)

    def end(self, train: str, restart: int = 0, **env: str) -> tuple[str, int, str]:
        process = self.start(train, restart, **env)
        process.communicate(timeout=SECONDS)
        return self.last(process.returncode)

    @property
    def output(self) -> str:
        return (self.folder / "run/logs/slurm-7.log").read_text()

    def last(self, code: int) -> tuple[str, int, str]:
        event = json.loads((self.folder / "run/slurm.jsonl").read_text().splitlines()[-1])
        return event["event"], code, event["reason"]

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def requeued(self) -> int:
        return self.calls.count("requeue 7")


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    until(path.exists, str(path))
