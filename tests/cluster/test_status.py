"""`tandem status`, for run folders in every state that a run can be in."""

import io
import json
import math
import os
import shutil
import socket
import subprocess
import sys

import pytest
from rich.console import Console

import cluster.status
from cluster import LaunchError, commands, run_files
from cluster.run_files import newest_rows
from cluster.scheduler import QueuedJob, queued_jobs
from cluster.status import RunStatus, read_array, read_run, read_runs, table, to_json
from configs.runs import started
from tests.cluster.conftest import install
from tests.cluster.folders import ELSEWHERE, Folder


@pytest.fixture
def run(tmp_path):
    return Folder(tmp_path / "runs")


def test_new_run(run):
    status = read_run(run.path, [])
    assert (status.state, status.step, status.steps) == ("new", 0, 100)


def test_a_checkpoint_that_a_live_run_deletes_meanwhile_hides_nothing_else(run, monkeypatch):
    run.save(10)
    run.save(20)

    def deleted(checkpoint):
        shutil.rmtree(run.path / "checkpoints" / "step-000000020", ignore_errors=True)
        return math.inf

    monkeypatch.setattr(run_files, "_writer", deleted)
    assert read_run(run.path, []).checkpoint == 10


def test_running_here(run):
    run.log(10, 20, 30)
    run.attempt(os.getpid())
    run.save(20)
    run.path.joinpath("logs").mkdir()
    run.path.joinpath("logs/rank-000.log").touch()
    status = read_run(run.path, [])
    assert (status.state, status.step, status.attempts) == ("running", 30, 1)
    assert status.losses["teacher"] == pytest.approx(7.7)
    assert list(status.losses) == ["teacher", "tiny"]
    assert status.tokens_per_second == 500
    assert status.seconds_left == pytest.approx(140)
    assert status.checkpoint == 20
    assert status.checkpoint_age is not None
    assert status.log == str(run.path / "logs/rank-000.log")


def test_the_rows_of_each_run_are_read_once(run, monkeypatch):
    run.log(10, 20)
    read, newest = [], run_files.newest_rows
    monkeypatch.setattr(run_files, "newest_rows", lambda file: read.append(file) or newest(file))
    assert len(read_runs(run.path.parent, [])) == len(read) == 1


def test_a_student_that_the_config_has_no_longer_has_no_loss(run):
    """Its rows come from the run that was forked, or from before the job was resumed without it."""
    run.log(10, 20)
    for students, shown in (("{tiny: {}}", ["teacher", "tiny"]), ("{}", ["teacher"])):
        (run.path / "config.yaml").write_text(f"steps: 100\nstudents: {students}\n")
        assert list(read_run(run.path, []).losses) == shown


def test_time_left_is_that_of_the_steps_or_of_the_hours_whichever_is_less(run):
    run.log(10, 20, 30)
    run.attempt(os.getpid())
    spent = [row["seconds"] for row in newest_rows(run.path / "metrics.jsonl") if "seconds" in row]
    for hours, left in ((10.0, 140.0), ((spent[-1] + 50) / 3600, 50.0)):
        (run.path / "config.yaml").write_text(f"steps: 100\nhours: {hours}\n")
        assert read_run(run.path, []).seconds_left == pytest.approx(left)


def test_a_recycled_process_id_is_not_the_run(run):
    run.log(10)
    run.attempt(os.getpid(), started=started(os.getpid()) - 1)
    assert read_run(run.path, []).state == "failed"


def test_a_process_lives_however_new_its_folder_in_proc_is(run):
    """Linux makes the folder anew after it was short of memory."""
    run.log(10)
    run.attempt(os.getpid(), since=1000.0)  # before any folder of this boot
    assert read_run(run.path, []).state == "running"


def test_stalled(run):
    """The heartbeat continues: its thread runs beside ranks that hang."""
    run.log(10, 20, 30)
    run.attempt(os.getpid())
    run.age(1200)
    os.utime(run.path / "attempts/000001.json")
    status = read_run(run.path, [])
    assert (status.state, status.reason) == ("stalled", "no progress for 20 minutes")
    os.utime(run.path / "metrics.jsonl")  # by rank 0, of a batch scored or a learner exported
    assert read_run(run.path, []).state == "running"
    run.age(1200)
    run.event("start")  # begins anew, after a wait in the queue: not stalled yet
    assert read_run(run.path, None).state == "running"


def test_slow_is_not_stalled(run):
    """With rows 200 s apart, a quarter of an hour without a row is normal."""
    run.log(10, 20, 30, seconds_each=20)
    run.attempt(os.getpid())
    run.age(900)
    assert read_run(run.path, []).state == "running"


def test_the_first_rows_may_take_their_time(run):
    run.attempt(os.getpid())
    run.age(1500)
    assert read_run(run.path, []).state == "running"
    run.age(2000)
    assert read_run(run.path, []).state == "stalled"
    run.log(20, seconds_each=20)  # 400 s after the start
    run.age(900)
    assert read_run(run.path, []).state == "running"


def test_stopped_and_failed(run):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    run.log(10, 20)
    run.attempt(process.pid)
    assert read_run(run.path, []).reason.endswith("start it again to begin from step 0")
    run.save(10)
    assert read_run(run.path, []).state == "failed"
    assert read_run(run.path, []).reason.endswith("to resume from its last checkpoint")
    run.save(20)
    assert read_run(run.path, []).state == "stopped"


def test_finished(run):
    run.log(100)
    (run.path / "evaluation.json").write_text('{"step": 100}')
    assert read_run(run.path, []).state == "finished"


def test_finished_when_its_hours_are_used_up(run):
    run.log(70)
    run.save(70)
    (run.path / "evaluation.json").write_text('{"step": 70, "seconds": 9001.5}')
    assert read_run(run.path, []).state == "stopped"  # more steps than it was finished with
    for hours, state in ((2.5, "finished"), (2.6, "stopped")):
        (run.path / "config.yaml").write_text(f"steps: 100\nhours: {hours}\n")
        assert read_run(run.path, []).state == state


def test_an_attempt_that_made_no_step_has_failed(run):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    run.attempt(process.pid)
    assert read_run(run.path, []).state == "failed"


@pytest.mark.parametrize(
    ("event", "code", "state"),
    [("final", 1, "failed"), ("final", 75, "stopped"), ("ended", 75, "stopped")],
)
def test_ended_in_slurm(run, event, code, state):
    run.event("start")
    run.event(event, code, "why")
    status = read_run(run.path, [])
    assert (status.state, status.reason) == (state, "why")


def test_queued_and_running_in_slurm(run):
    run.submit("7")
    pending = QueuedJob("7", "7", "PENDING", "Priority")
    status = read_run(run.path, [pending])
    assert (status.state, status.reason, status.job) == ("queued", "Priority", "7")
    for event in ("start", "requeue", "start"):
        run.event(event, reason="the time limit" if event == "requeue" else "")
    running = QueuedJob("7", "7", "RUNNING", "None")
    status = read_run(run.path, [running, pending])
    assert (status.state, status.restarts) == ("running", ["the time limit"])


def test_an_array_of_seeds_is_its_runs(run, tmp_path, capsys, monkeypatch):
    """The submitted name has a row as long as some of the array has not begun."""
    monkeypatch.setattr(cluster.status, "recorded_ends", lambda ids: {"12": "CANCELLED"})
    array = tmp_path / "runs/lr[1e-4]/submissions/001"
    array.mkdir(parents=True)
    for name, text in {"config.yaml": "steps: 100\n", "jobs": "12\n", "seeds": "1\n2\n"}.items():
        (array / name).write_text(text)
    seed = Folder(tmp_path / "runs", "lr[1e-4]-seed1")
    seed.event("start", job="13")
    running = QueuedJob("12_0", "13", "RUNNING", "None")
    pending = QueuedJob("12_[1]", "12", "PENDING", "Resources")

    def shown(*jobs):
        rows = read_runs(tmp_path / "runs", jobs)
        return [(one.name, one.state, one.reason) for one in rows if one.name != "demo"]

    one = ("lr[1e-4]-seed1", "running", "")
    assert shown(running, pending) == [("lr[1e-4]", "queued", "Resources"), one]
    starting = QueuedJob("12_1", "12", "RUNNING", "None")
    assert shown(running, starting) == [("lr[1e-4]", "running", ""), one]
    cancelled = ("lr[1e-4]", "stopped", "job 12 was cancelled before it started")
    assert shown(running) == [cancelled, one]
    Folder(tmp_path / "runs", "lr[1e-4]-seed2").event("final", 1, "bad node n1", job="12")
    assert shown(running) == [one, ("lr[1e-4]-seed2", "failed", "bad node n1")]
    (tmp_path / "runs/lr[1e-4]-seed2/config.yaml").unlink()  # it ended before there was one
    assert shown(running) == [one, ("lr[1e-4]-seed2", "failed", "bad node n1")]
    commands.status("lr[1e-4]", False, tmp_path / "runs")
    assert "lr[1e-4]-seed1" in capsys.readouterr().out


def test_an_array_that_has_just_been_handed_over_is_a_row(tmp_path):
    array = tmp_path / "runs/sweep/submissions/001"
    array.mkdir(parents=True)
    for name, text in {"config.yaml": "steps: 100\n", "jobs": "12\n", "seeds": "1\n2\n"}.items():
        (array / name).write_text(text)
    both = [QueuedJob(f"12_{i}", f"{12 + i}", "RUNNING", "None") for i in (0, 1)]
    rows = read_runs(tmp_path / "runs", both)
    assert [(row.name, row.state, row.steps) for row in rows] == [("sweep", "running", 100)]
    assert [row.state for row in read_array(tmp_path / "runs/sweep", None)] == ["new"]


BROKEN = {
    "config.yaml": ["a: [1", "- 1\n- 2\n", "steps: many\n", "\x00", ""],
    "evaluation.json": ['{"step": 10', "{}", "[]"],
    "metrics.jsonl": [
        f'{{"step": 1{"0" * 400}}}\n',
        '{"step": "x"}\n',
        '{"step": 5, "teacher/loss": "abc"}\n[]\n',
    ],
    "slurm.jsonl": [
        '{"a": 1}\n',
        '{"event": "final"}\n',
        '{"event": "start", "time": "x"}\n',
        '{"event": [], "job": {}}\n',
    ],
    "alerts.jsonl": ['{"a": 1}\n'],
    "slow_ranks.json": ['{"a": 1}'],
    "attempts/000001.json": ["[]", "{}", "{", '{"time": "x"}', '{"job": []}', '{"machine": 1}'],
    "submissions/001/jobs": ["", "\n", "\x00"],
}


def test_a_folder_that_is_broken_or_no_run_does_not_hide_the_others(run, tmp_path, capsys):
    cases = [(name, text) for name, texts in BROKEN.items() for text in texts]
    for number, (name, text) in enumerate(cases):
        broken = Folder(tmp_path / "runs", f"broken{number:02d}").path / name
        broken.parent.mkdir(parents=True, exist_ok=True)
        broken.write_text(text)
    (tmp_path / "runs/odd/config.yaml").mkdir(parents=True)
    Folder(tmp_path / "runs", ".half.host-1234-0a1b2c3d.part")
    rows = read_runs(tmp_path / "runs", [])
    assert len(rows) == len(cases) + 2  # with `odd` and `run`; one half-made is none yet
    states = [one.state for one in rows if one.name.startswith("broken")]
    assert [state == "unreadable" for state in states] == [
        name == "config.yaml" for name, _ in cases
    ]
    for as_json in (False, True):
        commands.status(None, as_json, tmp_path / "runs")
    assert "broken01 is unreadable: " in capsys.readouterr().out
    with pytest.raises(LaunchError, match=r"config\.yaml: not valid YAML"):
        commands.status("broken00", False, tmp_path / "runs")


def test_a_foreign_event_does_not_hide_the_others(run):
    run.attempt(1, job="8")
    run.event("requeue", reason="the node failed")
    run.event("start", time="x")
    assert read_run(run.path, []).reason.startswith("the node failed")


@pytest.mark.parametrize("seeds", [b"1\n\xff\n", b"1\n../2\n", b"\0"])
def test_an_array_without_a_list_of_its_seeds_is_named(run, tmp_path, capsys, seeds):
    array = Folder(tmp_path / "runs", "sweep").path
    (array / "submissions/001").mkdir(parents=True)
    (array / "config.yaml").rename(array / "submissions/001/config.yaml")
    (array / "submissions/001/seeds").write_bytes(seeds)
    (array / "submissions/001/jobs").write_bytes(b"12 \xff\n")
    for rows in (read_runs(tmp_path / "runs", []), read_array(array, [])):
        assert (rows[-1].name, rows[-1].state) == ("sweep", "unreadable")
        assert "001/seeds: damaged" in rows[-1].reason
    commands.status(None, False, tmp_path / "runs")
    assert "demo" in capsys.readouterr().out


def test_a_student_shows_the_loss_that_compares_with_the_teachers(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    rows = {"teacher/loss": 4.0, "teacher/mlm": 4.0, "students/soft/loss": 2.5}
    rows |= {"students/half/loss": 7.5, "students/half/mlm": 5.0, "students/half/soft_kl": 2.5}
    (run.path / "metrics.jsonl").write_text(json.dumps({"step": 10, "seconds": 1.0, **rows}) + "\n")
    status = read_run(run.path, [])
    assert status.losses == {"teacher": 4.0, "half": 7.5, "soft": 2.5}
    assert status.masked_losses == {"teacher": 4.0, "half": 5.0}
    commands.status("demo", False, run.path.parent)
    shown = capsys.readouterr().out
    for line in ("teacher 4.000 ", "half 5.000 (mlm)", "soft 2.500 (no mlm)"):
        assert line in shown


def test_a_damaged_file_that_hides_how_a_run_went_is_said(run, capsys):
    assert read_run(run.path, []).damaged == []
    (run.path / "evaluation.json").write_text("[" * 20_000)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "teach\x00')  # torn: it may be being written
        assert len(read_run(run.path, []).damaged) == 1
        file.write('\n{"step": 8}\n')
    commands.status(str(run.path), False)
    said = capsys.readouterr().out
    assert "demo: evaluation.json is damaged; tandem train writes it again" in said
    assert "demo: metrics.jsonl is damaged; its other rows are shown" in said


def test_metrics_that_are_no_rows_or_no_file_are_said(run):
    metrics = run.path / "metrics.jsonl"
    metrics.write_text('[{"format": 1}]')  # without a line's end, yet no torn row
    assert read_run(run.path, []).damaged == ["metrics.jsonl is damaged; its other rows are shown"]
    metrics.unlink()
    metrics.mkdir()
    assert read_run(run.path, []).damaged == ["metrics.jsonl is not a file; move it away"]


def test_a_folder_of_the_runs_name_elsewhere_does_not_hide_it(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    commands.status("demo", False)
    monkeypatch.chdir(run.path)
    commands.status(".", False)
    assert capsys.readouterr().out.count("demo ") >= 2


def test_a_task_of_an_array(run):
    run.event("start", job="13")
    job = QueuedJob("12_1", "13", "RUNNING", "None")
    assert read_run(run.path, [job]).job == "12_1"
    assert read_run(run.path, [QueuedJob("13", "14", "RUNNING", "")]).job is None


def test_without_an_answer_from_slurm_the_folder_decides(run):
    run.event("start")
    run.log(10)
    assert read_run(run.path, None).state == "running"


def test_torn_line_is_left_out(run):
    run.log(10)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')
    assert read_run(run.path, []).step == 10


def test_submitted_but_never_started(tmp_path):
    folder = tmp_path / "runs/later/submissions/001"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("steps: 5\n")
    assert [one.name for one in read_runs(tmp_path / "runs", [])] == ["later"]


def test_json_is_strict(run):
    run.log(10)
    text = to_json(read_runs(run.path.parent, []))
    assert json.loads(text)[0]["losses"]["tiny"] is None


def test_table(run, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    run.log(10, 20)
    run.attempt(2**22 + 1)
    commands.status(None, False, run.path.parent)
    commands.status("demo", False, run.path.parent)
    out = capsys.readouterr().out
    assert out.count("20 of 100") == 2
    assert "demo failed: it ended without saving" in out


def test_a_path_stays_whole_in_a_pipe(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run = Folder(tmp_path / "long" / "/".join(["a folder"] * 12))
    run.log(10)
    log = run.path / "logs/rank-000.log"
    log.parent.mkdir()
    log.touch()
    commands.status(str(run.path), as_json=False)
    assert f"demo logs to {log}\n" in capsys.readouterr().out


def test_numbers_stay_whole_on_a_narrow_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = Folder(tmp_path / "runs", "a_run_with_a_long_name", steps=100_000)
    folder.log(43_210, 43_220)
    folder.attempt(os.getpid())
    folder.save(43_000)
    commands.status(None, False, tmp_path / "runs")
    out = capsys.readouterr().out
    assert "…" not in out
    assert {"43,220", "100,000", "43,000", "500", "running"} <= {
        word.strip(",") for word in out.split()
    }


def test_no_column_is_lost_to_long_names_of_students(tmp_path, monkeypatch):
    status = RunStatus(
        name="a_run_with_a_long_name",
        state="running",
        steps=1_000_000,
        losses={"teacher": 2.125, "a_student_with_twelve_layers": 3.25},
        tokens_per_second=1_234_567.0,
        seconds_left=1e6,
        checkpoint=123_000,
        checkpoint_age=400.0,
        attempts=12,
    )
    console = Console(width=80, file=io.StringIO())
    console.print(table([status]))
    words = console.file.getvalue().split()
    assert {"starts", "12", "saved", "123,000,", "1,234,567", "2.125", "3.250"} <= {*words}


def test_squeue_without_a_controller_is_one_reason(tmp_path, slurm_programs, capsys):
    lines = ("error: fetch_config: DNS SRV lookup failed", "fatal: no configuration source")
    echoes = "; ".join(f"echo 'squeue: {line}' >&2" for line in lines)
    install(tmp_path, squeue=f"{echoes}; exit 1")
    Folder(tmp_path / "runs").submit("41")
    commands.status(None, False, tmp_path / "runs")
    said = " ".join(capsys.readouterr().out.split())
    assert said.endswith("SLURM's queue cannot be read: squeue: no configuration source")


def test_other_jobs_commands_may_have_lines_and_any_bytes(tmp_path, slurm_programs):
    install(
        tmp_path,
        squeue=r"""
        printf '41|41|RUNNING|None|/x.sh first\nsecond|line\n'
        printf '42|42|PENDING|Priority|/caf\351.sh\n'""",
    )
    assert [(job.id, job.state) for job in queued_jobs()] == [("41", "RUNNING"), ("42", "PENDING")]


def test_unknown_run_is_one_line(tmp_path):
    with pytest.raises(LaunchError, match="not a run"):
        commands.status("nope", False, tmp_path)


@pytest.mark.parametrize("process", [1, os.getpid()], ids=["init", "this"])
def test_a_process_on_another_machine_shows_that_it_lives(run, process):
    """Whatever process has the same number here; of the same hostname, it is a container's."""
    run.log(1, 2)
    run.attempt(process, machine=ELSEWHERE, host=socket.gethostname())
    assert read_run(run.path, []).state == "running"
    run.age(120.0)
    assert read_run(run.path, []).state == "failed"
    run.attempt(process, machine=ELSEWHERE, ended=True)
    assert read_run(run.path, []).state == "failed"


def test_a_record_of_an_old_version_that_names_no_machine_is_judged_by_its_heartbeat(run):
    run.log(1, 2)
    (run.path / "attempts").mkdir()
    old = {"host": socket.gethostname(), "process": os.getpid(), "time": 1000.0}
    (run.path / "attempts/000001.json").write_text(json.dumps(old))
    assert read_run(run.path, []).state == "running"
    run.age(120.0)
    assert read_run(run.path, []).state == "failed"


def test_slow_ranks_and_alerts_are_shown(tmp_path, capsys):
    folder = Folder(tmp_path / "runs")
    folder.log(1, 2)
    folder.attempt(os.getpid())
    says = "rank 3 on n7 is slow: it computes 2.0 times as long"
    (folder.path / "slow_ranks.json").write_text(json.dumps([{"rank": 3, "says": says}]))
    alert = {"time": 1.0, "title": "spike", "text": "rolled back"}
    (folder.path / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    run = read_run(folder.path, None)
    assert (run.slow_ranks, run.alerts) == ([says], ["spike: rolled back"])
    commands.status(None, as_json=False, root=tmp_path / "runs")
    shown = " ".join(capsys.readouterr().out.split())
    assert "demo: rank 3 on n7 is slow" in shown
    assert "demo alerted: spike: rolled back" in shown
