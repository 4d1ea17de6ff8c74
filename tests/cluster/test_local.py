"""The local launcher with small child processes: exit codes, signals, a terminal, no orphans."""

import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cluster.local import becoming, launch
from configs.errors import OptionError
from tests.waiting import SECONDS, exit_code, read, until

# A rank that obeys the contract: it stops on request with 75, and notes what it received.
OBEDIENT = """
    import os, signal, sys, time
    from pathlib import Path
    note = Path(sys.argv[1]) / f"rank-{os.environ['RANK']}"
    time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 0)
    received = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: received.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
    if os.environ["RANK"] == "0":
        print("terminal" if sys.stdout.isatty() else "no terminal", flush=True)
    note.with_suffix(".pid").write_text(str(os.getpid()))
    while not received:
        time.sleep(0.01)
    time.sleep(float(sys.argv[2]))
    note.write_text(" ".join(signal.Signals(number).name for number in received))
    sys.exit(75)
"""


def python(script: str, *args: object) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]


LAUNCHER = """
import sys
from cluster.local import becoming, launch

def forked():
    program, sys.argv = sys.argv[4], sys.argv[4:]
    exec(program, {})
    return 0

nproc = int(sys.argv.pop())
sys.exit(launch(forked if sys.argv[1] == "forks" else becoming(sys.argv[2:]), nproc))
"""
KINDS = pytest.mark.parametrize("kind", ["programs", "forks"])


def launcher(argv: list[str], nproc: int, kind: str = "programs") -> list[str]:
    """A launcher whose ranks exec a Python program, or run it in their own process."""
    return [sys.executable, "-c", LAUNCHER, kind, *argv, str(nproc)]


def started(folder: Path, nproc: int) -> list[int]:
    """The process ids of the ranks, once they have their signal handlers."""
    files = [folder / f"rank-{rank}.pid" for rank in range(nproc)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ranks_that_succeed_end_with_code_0(capfd):
    script = """
        import os
        if os.environ["RANK"] == "0": print("from rank", os.environ["RANK"])
        else: print("unseen")
        assert os.environ["WORLD_SIZE"] == "3" and os.environ["OMP_NUM_THREADS"]
    """
    assert launch(becoming(python(script)), 3) == 0
    assert capfd.readouterr().out == "from rank 0\n"


def test_ranks_share_their_meeting_point(tmp_path):
    script = """
        import os, sys
        from pathlib import Path
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(map(os.environ.get, names)))
    """
    assert launch(becoming(python(script, tmp_path)), 2) == 0
    first, second = ((tmp_path / rank).read_text().split() for rank in "01")
    assert first[0] == "0"
    assert second[0] == "1"
    assert first[1:] == second[1:]


@pytest.mark.parametrize(("codes", "expected"), [("75 75", 75), ("0 75", 75), ("0 0", 0)])
def test_stopped_on_request(codes, expected):
    script = "import os, sys; sys.exit(int(sys.argv[1].split()[int(os.environ['RANK'])]))"
    assert launch(becoming(python(script, codes)), 2) == expected


def test_one_error_is_shown_once(tmp_path, capfd):
    """Rank 0 fails because rank 1 did; only rank 1's error is shown, and its exit code returned."""
    script = """
        import os, sys, time
        from pathlib import Path
        failed = Path(sys.argv[1], "failed")
        if os.environ["RANK"] == "1":
            sys.stderr.write("the cause\\n")
            failed.touch()
            os._exit(3)
        while not failed.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        sys.stderr.write(f"connection lost by rank {os.environ['RANK']}\\n")
        sys.exit(1)
    """
    assert launch(becoming(python(script, tmp_path)), 3) == 3
    assert capfd.readouterr().err == "the cause\n"


def test_a_rank_that_a_signal_ended_is_the_one_to_blame(capfd):
    """Even if it ends last: the others only saw its connections close."""
    script = """
        import os, signal, sys, time
        if os.environ["RANK"] == "0": sys.exit("connection lost")
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGALRM)
    """
    assert launch(becoming(python(script)), 2) == 128 + signal.SIGALRM
    assert "rank 1 was ended by SIGALRM: no progress for watch.hang" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("killed", "restarts", "code", "started"),
    [("1", 2, 0, 2), ("1 1", 2, 0, 3), ("1 1", 1, 128 + signal.SIGALRM, 2), ("0", 2, 3, 1)],
    ids=["once", "twice", "too often", "another failure"],
)
def test_ranks_are_started_again_after_a_signal(tmp_path, capfd, killed, restarts, code, started):
    """Rank 1 is ended by a signal as often as it is told to, or fails by itself."""
    script = """
        import os, signal, sys
        from pathlib import Path
        if os.environ["RANK"] == "1":
            starts = Path(sys.argv[1], "starts")
            number = len(starts.read_text()) if starts.exists() else 0
            assert number == int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
            starts.write_text("x" * (number + 1))
            for kill in sys.argv[2].split()[number:]:
                if kill == "0":
                    sys.exit(3)
                os.kill(os.getpid(), signal.SIGALRM)
    """
    calls: list[None] = []
    ranks = becoming(python(script, tmp_path, killed))
    found = launch(ranks, 2, restarts=restarts, before_restart=lambda: calls.append(None))
    assert (found, len((tmp_path / "starts").read_text())) == (code, started)
    assert len(calls) == started - 1
    assert capfd.readouterr().err.count("starting the ranks again") == started - 1


def test_ranks_that_hang_after_a_failure_are_killed(tmp_path, capfd):
    script = """
        import os, signal, subprocess, sys, time
        from pathlib import Path
        rank = os.environ["RANK"]
        helper = subprocess.Popen(["sleep", "60"])
        Path(sys.argv[1], f"rank-{rank}.pid").write_text(str(helper.pid))
        if rank == "1":
            while not Path(sys.argv[1], "rank-0.pid").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)
    """
    assert launch(becoming(python(script, tmp_path)), 2, grace=0.3) == 128 + signal.SIGSEGV
    assert "rank 1 was ended by SIGSEGV" in capfd.readouterr().err
    helpers = started(tmp_path, 2)
    until(lambda: not any(alive(pid) for pid in helpers))


def test_rank_0_standard_error_is_passed_on_while_it_runs():
    script = """
        import os, sys, time
        if os.environ["RANK"] == "0": sys.stderr.write("a warning\\n")
        time.sleep(60)
    """
    with subprocess.Popen(launcher(python(script), 2), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert read(process.stderr.fileno()) == b"a warning\n"
        process.kill()


@KINDS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_every_rank_once(tmp_path, number, kind):
    process = subprocess.Popen(launcher(python(OBEDIENT, tmp_path, 0.3), 2, kind))
    started(tmp_path, 2)
    process.send_signal(number)
    assert process.wait(SECONDS) == 75
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == [number.name] * 2


@pytest.mark.parametrize(("one_of_several", "code"), [(True, 75), (False, 0)])
def test_a_stop_too_late_for_a_job_is_one_for_those_after_it(one_of_several, code):
    script = "import os, signal; os.kill(os.getppid(), signal.SIGTERM)"
    assert launch(becoming(python(script)), 1, one_of_several=one_of_several) == code


@KINDS
def test_a_signal_before_the_ranks_are_ready_is_kept(tmp_path, kind):
    process = subprocess.Popen(launcher(python(OBEDIENT, tmp_path, 0, 1), 2, kind))
    until(lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 75


def test_closing_the_terminal_stops_politely(tmp_path):
    command = launcher(python(OBEDIENT, tmp_path, 0), 2)
    # These tests may themselves run under nohup, whose children ignore the signal.
    process = subprocess.Popen(
        command, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)
    )
    started(tmp_path, 2)
    process.send_signal(signal.SIGHUP)
    assert process.wait(SECONDS) == 75
    assert (tmp_path / "rank-1").read_text() == "SIGTERM"


def in_terminal(argv: list[str]) -> tuple[int, int]:
    """Run a command in the foreground of a new terminal; returns its pid and our end."""
    pid, master = pty.fork()
    if pid == 0:
        os.execv(argv[0], argv)
    return pid, master


@KINDS
def test_control_c_in_a_terminal(tmp_path, kind):
    pid, master = in_terminal(launcher(python(OBEDIENT, tmp_path, 0.3), 2, kind))
    started(tmp_path, 2)
    assert read(master) == b"terminal\r\n"
    os.write(master, b"\x03")
    assert exit_code(pid) == 75
    assert (tmp_path / "rank-0").read_text() == (tmp_path / "rank-1").read_text() == "SIGINT"
    os.close(master)


def test_second_control_c_is_at_once(tmp_path):
    pid, master = in_terminal(launcher(python(OBEDIENT, tmp_path, 60), 2))
    ranks = started(tmp_path, 2)
    output = read(master)
    os.write(master, b"\x03")
    while b"Ctrl-C again" not in output:
        output += read(master)
    os.write(master, b"\x03")
    assert exit_code(pid) == 130
    assert not any(alive(rank) for rank in ranks)
    os.close(master)


@KINDS
def test_no_rank_outlives_a_killed_launcher(tmp_path, kind):
    process = subprocess.Popen(launcher(python(OBEDIENT, tmp_path, 0), 3, kind))
    ranks = started(tmp_path, 3)
    process.kill()
    process.wait(SECONDS)
    until(lambda: not any(alive(rank) for rank in ranks))


@pytest.mark.parametrize("nproc", [0, 10**11])
def test_no_processes_or_far_too_many_are_refused(nproc):
    with pytest.raises(OptionError, match=f"--nproc {nproc}: must be at least 1 and at most 1,024"):
        launch(becoming(["true"]), nproc)


def test_a_rank_that_is_killed_before_it_has_a_session_of_its_own_is_told():
    script = """
        import os, signal, sys
        from cluster import local
        local._tie_to = lambda launcher: os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(local.launch(lambda: 0, 1))
    """
    done = subprocess.run(python(script), capture_output=True, text=True, timeout=SECONDS)
    why = "perhaps because the memory ran out; start it again to resume"
    assert (done.returncode, done.stderr) == (137, f"rank 0 was ended by SIGKILL, {why}\n")
