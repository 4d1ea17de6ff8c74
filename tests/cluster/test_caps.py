"""Caps on requeues and GPU-hours, which end a run for good; and messages about the end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cluster.config import ClusterConfig, with_options
from cluster.status import read_run
from configs.errors import UserError
from tests.cluster.batch_script import STOP, Run
from tests.waiting import SECONDS

TOLD = 'echo "$TANDEM_END|$TANDEM_REASON|${TANDEM_RUN##*/}" >>"$CALLS.told"'
ACCOUNT = "run/submissions/001/accounts/7"
USAGE = f"{ACCOUNT}/usage"


def told(run: Run) -> list[str]:
    file = Path(f"{run.folder}/calls.told")
    return file.read_text().splitlines() if file.exists() else []


def test_after_so_many_requeues_the_run_ends(tmp_path):
    run = Run(tmp_path, max_requeues=2, at_end=[TOLD])
    for restart in (0, 1):
        assert run.end(f"step {restart + 1}; exit 9", restart)[0] == "requeue"
    assert told(run) == []
    verdict, code, reason = run.end("step 3; exit 9", 2)
    assert (verdict, code) == ("final", 9)
    assert reason.endswith("it has been requeued 2 times, which is the limit")
    assert told(run) == [f"failed|{reason}|run"]


def test_requeues_of_slurm_itself_count(tmp_path):
    """Nodes fail, so that no start ends normally."""
    run = Run(tmp_path, max_requeues=1, at_end=[TOLD])
    assert run.end("step 1; exit 9", 0)[0] == "requeue"
    usage = tmp_path / USAGE
    usage.write_text(usage.read_text() + f"{int(time.time())} 0\n")  # the first requeue's
    verdict, code, reason = run.end("finish", 2)
    assert (verdict, code) == ("final", 75)
    assert "which is the limit" in reason
    assert len(told(run)) == 1


def test_gpu_hours_of_all_starts_count(tmp_path):
    """Two nodes of four GPUs for 100 s, then a start of 50 s that did not end normally."""
    run = Run(tmp_path, gpus_per_node="4", max_gpu_hours=0.4, at_end=[TOLD])
    now = int(time.time())
    (tmp_path / ACCOUNT).mkdir(parents=True)
    (tmp_path / USAGE).write_text(f"{now - 900} 8 {now - 800}\n{now - 500} 8\n")
    attempts = tmp_path / "run/attempts"
    attempts.mkdir(parents=True)
    (attempts / "000001.json").write_text("{}")
    os.utime(attempts / "000001.json", (now - 450, now - 450))
    (tmp_path / ACCOUNT / "progress").write_text("0 0 closed 7/1\n")
    assert run.end("step 1; exit 9", 2)[0] == "requeue"  # 0.4 hours are 180 s of eight GPUs
    lines = [line.split() for line in (tmp_path / USAGE).read_text().splitlines()]
    assert [int(line[2]) - int(line[0]) for line in lines[:2]] == [100, 50]
    assert [line[1] for line in lines] == ["8", "8", "8"]
    (tmp_path / USAGE).write_text(f"{now - 900} 8 {now - 700}\n")
    assert run.end("finish", 3) == ("final", 75, "max_gpu_hours: its 0.4 GPU-hours are spent")
    assert told(run) == ["stopped|max_gpu_hours: its 0.4 GPU-hours are spent|run"]


def test_when_the_gpu_hours_are_used_up_the_ranks_save(tmp_path):
    run = Run(tmp_path, gpus_per_node="1", max_gpu_hours=2 / 1800, at_end=[TOLD])  # 2 s of 2 GPUs
    train = "trap 'step 7; exit 75' USR1; touch up; for i in {1..100}; do sleep 0.1; done"
    verdict, code, reason = run.end(train)
    assert (verdict, code) == ("final", 75)
    assert reason == "max_gpu_hours: its 0.00111111 GPU-hours are spent"
    assert "7" in (tmp_path / "run/metrics.jsonl").read_text()
    assert run.requeued == 0


@pytest.mark.parametrize(
    ("train", "cluster", "env", "expected"),
    [
        ("finish", {}, {}, ["finished|finished|run"]),
        ("echo tandem: no; exit 1", {}, {}, ["failed|the ranks failed: no|run"]),
        (f"{STOP}; exit 75", {}, {}, ["stopped|stopped on request|run"]),
        ("step 1; exit 9", {}, {}, []),
        ("step 1; exit 9", {"requeue": False}, {}, ["stopped|the ranks ended with code 9|run"]),
        ("finish", {"before": ["false"]}, {}, ["failed|false failed on n1|run"]),
    ],
)
def test_the_end_is_told_once_and_no_requeue_is_one(tmp_path, train, cluster, env, expected):
    run = Run(tmp_path, at_end=[TOLD], **cluster)
    run.end(train, **env)
    assert told(run) == expected


def test_of_a_chain_the_end_is_told_by_the_job_that_meets_it(tmp_path):
    run = Run(tmp_path, at_end=[TOLD], chained=True)
    (run.submission / "jobs").write_text("7\n8\n")
    run.end("step 1; kill -USR1 $PPID; sleep 0.3; exit 75")
    assert told(run) == []
    run.end("finish")
    assert told(run) == ["finished|finished|run"]
    run.start("finish").communicate(timeout=SECONDS)
    assert told(run) == ["finished|finished|run"]


def test_a_chain_that_its_caps_have_ended_is_stopped_and_not_failed(tmp_path):
    run = Run(tmp_path, chained=True, gpus_per_node="1", max_gpu_hours=1e-9)
    (run.submission / "jobs").write_text("7\n8\n")
    assert run.end("touch started")[:2] == ("final", 75)
    _, code, why = run.end("touch started", SLURM_JOB_ID="8")
    assert (code, why) == (1, "max_gpu_hours: its 1e-09 GPU-hours are spent")
    assert read_run(tmp_path / "run", []).state == "stopped"
    assert not (tmp_path / "run/started").exists()


def test_a_hook_that_fails_is_said_and_changes_nothing(tmp_path):
    run = Run(tmp_path, at_end=["false", TOLD])
    assert run.end("finish") == ("done", 0, "finished")
    assert "false failed on n1" in run.output
    assert told(run) == ["finished|finished|run"]


def test_caps_as_options():
    found = with_options(ClusterConfig(gpus_per_node="8"), ["--max-requeues", "3"])
    assert found.max_requeues == 3
    assert with_options(found, ["--max-gpu-hours=1.5e3"]).max_gpu_hours == 1500.0
    for arguments, words in {
        ("--max-requeues", "-1"): "--max-requeues: must be at least 0",
        ("--max-gpu-hours", "0"): "--max-gpu-hours: must be positive",
        ("--max-gpu-hours", "5", "--gpus-per-node", "0"): "needs gpus_per_node",
        ("--max-requeues", "few"): "must be a number",
    }.items():
        with pytest.raises(UserError, match=words):
            with_options(ClusterConfig(gpus_per_node="8"), arguments)
