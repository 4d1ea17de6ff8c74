"""What users do to a live run, and how it continues afterwards."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import socket

import pytest
from click.testing import CliRunner, Result

import configs
import tandem as command_line
from tests.conftest import tandem
from tests.faults.jobs import LIMIT, STOPPED, arguments, reach, start_program
from tests.waiting import until
from trainer.checkpoint.attempts import published
from trainer.checkpoint.folder import step_name
from trainer.checkpoint.reader import Checkpoint
from trainer.lifecycle import forking
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder

NEVER = (
    *("steps=1000000", "checkpoint.every=1000000", "evaluation.every=1000000", "log.every=5"),
    "students.distilbert.start.teacher=null",
)


def command(*words: object) -> Result:
    """Run a command of `tandem` in this process."""
    return CliRunner().invoke(command_line.main, [str(word) for word in words])


@pytest.fixture(scope="module")
def stopped(corpus, tmp_path_factory):
    """A run that was saved and stopped by command, and the output on the way."""
    runs = tmp_path_factory.mktemp("live")
    folder = RunFolder(runs / "tiny")
    # On one rank, since what writes the report gets the time that is left; forks write none.
    words = [*arguments(corpus, runs, *NEVER), "--nproc", "1"]
    process = start_program(["-m", "tandem", *words], runs)
    try:
        reach(process, folder.path, 10)
        rank = json.loads((folder.attempts / "000001.json").read_text())["process"]
        os.kill(rank, signal.SIGSTOP)  # leaves its processor to what writes the report
        report = folder.path / "report.html"
        until(report.exists, "a report", LIMIT)
        said = {
            "report": report.read_text(),
            "second": tandem(*arguments(corpus, runs, "seed=7"), "--nproc", 1),
        }
        os.kill(rank, signal.SIGCONT)
        said |= {who: command(who, folder.path) for who in ("checkpoint", "stop")}
        said["code"] = process.wait(300)
    finally:
        process.kill()
    return folder, said


def test_a_second_job_in_a_live_run_is_refused_naming_the_first(stopped):
    folder, said = stopped
    assert said["second"].returncode == 1
    record = json.loads((folder.attempts / "000001.json").read_text())
    assert re.fullmatch(
        rf"tandem: {folder.path}: this run is already running \(process {record['process']} on "
        rf"{socket.gethostname()}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\); wait for it, end it "
        rf"with `tandem stop {folder.path}`, or give this job another name\n",
        said["second"].stderr,
    )
    assert folder.load_config().seed == 1, "the second job has not touched the folder"
    assert os.listdir(folder.attempts) == ["000001.json"]


def test_a_browser_reloads_the_report_while_the_run_lives(stopped):
    folder, said = stopped
    assert 'http-equiv="refresh"' in said["report"]
    assert 'http-equiv="refresh"' not in (folder.path / "report.html").read_text()


def test_a_checkpoint_can_be_asked_for(stopped):
    folder, said = stopped
    answer = said["checkpoint"]
    assert answer.exit_code == 0, answer.output
    step = int(re.search(r"saved at step ([\d,]+)\n", answer.output)[1].replace(",", ""))
    assert step == published(folder.checkpoints)[0]
    Checkpoint(folder.checkpoints, step).verify()


def test_a_stop_can_be_asked_for(stopped):
    folder, said = stopped
    assert said["stop"].exit_code == 0, said["stop"].output
    assert "and ended" in said["stop"].output
    assert said["code"] == STOPPED
    newest = published(folder.checkpoints)[-1]
    assert f"saved at step {newest:,} " in said["stop"].output
    record = json.loads((folder.attempts / "000001.json").read_text())
    assert record["ended"]
    assert "finished" not in record


def test_going_on_with_another_order_is_refused_and_a_fork_offered(stopped, corpus):
    folder, _ = stopped
    refused = tandem(*arguments(corpus, folder.path.parent, *NEVER, "seed=7"), "--nproc", 1)
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert line.startswith("tandem: seed: 1 -> 7: the order of the data would change")
    assert folder.load_config().seed == 1
    words = shlex.split(line.partition(": tandem ")[2])
    assert (words[:2], words[-1]) == (["fork", str(folder.path)], "seed=7")
    forked = command(*words)
    assert forked.exit_code == 0, forked.output
    assert RunFolder(folder.path.with_name("tiny-2")).load_config().seed == 7


@pytest.mark.parametrize("kind", ["stop", "checkpoint"])
def test_a_run_that_is_not_live_cannot_be_asked(stopped, kind):
    folder, _ = stopped
    answer = command(kind, folder.path)
    assert answer.exit_code == 1
    assert answer.output == (
        f"tandem: {folder.path}: no job is running in it, so there is nothing to {kind}\n"
    )


def test_a_fork_goes_on_from_its_step_as_another_run(stopped, corpus):
    """With one student restarted in another shape, and other data; the first run is not changed.

    The fork's config is the checkpoint's, even if the run's own config has changed since.
    """
    folder, _ = stopped
    text = folder.config.read_text()
    folder.config.write_text(configs.dump(dataclasses.replace(folder.load_config(), steps=7)))
    step = published(folder.checkpoints)[0]
    changes = [
        "students.tinybert.model.hidden_size=8",
        "students.tinybert.model.heads=2",
        "students.tinybert.objective.attention_mse=null",
        "seed=5",
    ]
    name = ["--step", step, "--name", "branch"]
    before = Checkpoint(folder.checkpoints, step)
    forked = command("fork", folder.path, *name, *changes)
    folder.config.write_text(text)
    assert forked.exit_code == 0, forked.output
    assert "seed: 1 -> 5" in forked.output
    assert "students/tinybert is not copied" in forked.output
    new = RunFolder(folder.path.with_name("branch"))
    more = [f"steps={step + 4}", "evaluation.every=2", "log.every=1"]
    done = tandem("train", new.config, *more, "--nproc", 1)
    assert done.returncode == 0, done.stderr
    assert f"resuming from step {step:,}" in done.stdout
    change = f"changed since the newest checkpoint: steps: 1000000 -> {step + 4}"
    assert change in done.stdout
    assert change in (new.logs / "rank-000.log").read_text()
    rows = [row for row in metrics.read(new.metrics) if "teacher/loss" in row]
    copied = [row for row in metrics.read(folder.metrics) if row["step"] <= step]
    assert rows[: len(copied)] == copied
    assert rows[-1]["step"] == step + 4
    origin = json.loads(new.origin.read_text())
    assert (origin["run"], origin["step"]) == (str(folder.path), step)
    after = Checkpoint(new.checkpoints, step)
    after.verify()
    assert after.learners == ["teacher", "students/distilbert"]
    assert after.trainer_state["wandb_id"] != before.trainer_state["wandb_id"]
    before.verify()


def test_a_fork_from_a_step_that_is_not_there_lists_those_that_are(stopped):
    folder, _ = stopped
    answer = command("fork", folder.path, "--step", 3, "--name", "other")
    assert answer.exit_code == 1
    steps = ", ".join(map(str, published(folder.checkpoints)))
    assert answer.output == (
        f"tandem: {folder.checkpoints}: no checkpoint of step 3; there are: {steps}\n"
    )


@pytest.mark.parametrize(("owner", "reads"), [(Checkpoint, "verify"), (forking, "branch")])
def test_a_fork_of_what_the_run_deletes_meanwhile_is_one_line(stopped, monkeypatch, owner, reads):
    folder, _ = stopped
    step = published(folder.checkpoints)[0]
    deleted, aside = folder.checkpoints / step_name(step), folder.path / "aside"
    read = getattr(owner, reads)

    def gone(*arguments: object, **named: object) -> None:
        deleted.rename(aside)
        read(*arguments, **named)

    monkeypatch.setattr(owner, reads, gone)
    try:
        answer = command("fork", folder.path, "--step", step, "--name", "late")
    finally:
        aside.rename(deleted)
    assert answer.exit_code == 1
    assert answer.output.startswith(f"tandem: {deleted} is gone: the run keeps newer")


def test_a_fork_does_not_overwrite_a_run(stopped):
    folder, _ = stopped
    step = published(folder.checkpoints)[0]
    answer = command("fork", folder.path, "--step", step, "--name", "tiny")
    assert answer.exit_code == 1
    assert f"{folder.path}: exists; give the fork another name" in answer.output


def test_a_fork_keeps_its_teacher(stopped):
    folder, _ = stopped
    step = published(folder.checkpoints)[0]
    other = "teacher.model.norm_eps=1e-9"
    answer = command("fork", folder.path, "--step", step, "--name", "narrow", other)
    assert answer.exit_code == 1
    assert "teacher.model.norm_eps: a fork keeps its teacher" in answer.output
