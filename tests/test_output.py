"""A job's output is shown where possible, and never ends the job."""

import os
import subprocess
import sys

import pytest

from tests.conftest import command_environment

PROGRAM = """
import sys, click
from rich.console import Console
from commands.ending import ignore_write_errors
ignore_write_errors()
for _ in range(3):
    print("words" * 10_000, flush=True)
    click.echo("echo", err=True)
    Console().print("picture")
    sys.stderr.buffer.write(b"bytes"); sys.stderr.flush()
print("to the end")
"""


def run(out) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, stdout=out, stderr=out, env=command_environment(), timeout=60)


def test_what_cannot_be_written_is_dropped():
    with open("/dev/full", "wb") as full:
        assert run(full).returncode == 0
    reader, gone = os.pipe()
    os.close(reader)
    assert run(gone).returncode == 0
    os.close(gone)


@pytest.mark.parametrize("words", ["--help", "list"])
def test_a_full_disk_is_one_line(words):
    program = [sys.executable, "-m", "tandem", words]
    environment = command_environment() | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            program, stdout=full, stderr=subprocess.PIPE, env=environment, timeout=60
        )
    why = b"tandem: No space left on device; free some space, or choose another folder\n"
    assert (done.returncode, done.stderr) == (1, why)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_character_that_the_encoding_lacks_is_an_escape(encoding):
    line = "import tandem; tandem.main.command('say')(lambda: print('a \u0430'))"
    done = subprocess.run(
        [sys.executable, "-c", f"{line}; tandem.main(['say'])"],
        capture_output=True,
        env=command_environment(PYTHONIOENCODING=encoding),
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, b"a \\u0430\n"), done.stderr


def test_what_can_be_written_is():
    done = run(subprocess.PIPE)
    assert (done.returncode, done.stdout.count(b"words")) == (0, 30_000)
    assert done.stdout.endswith(b"to the end\n")


FILES = r"""
import logging
from pathlib import Path
from cluster.script import Job
from cluster.slurm import _write_submission
from trainer.run import _log_to_file

folder = Path()
job = Job("a", folder, folder, folder, "python")
_write_submission(job, "text \u0430", "name: \u0430", folder / "none")
_log_to_file(folder / "logs" / "rank", 1)
logging.info("line \u0430")
"""


def test_files_are_utf_8_whatever_the_locale(tmp_path):
    environment = command_environment(LC_ALL="POSIX", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    done = subprocess.run(
        [sys.executable, "-c", FILES],
        capture_output=True,
        env=environment,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for file in ("config.yaml", "job.sbatch", "logs/rank"):
        assert "\u0430" in (tmp_path / file).read_text(encoding="utf-8"), file
