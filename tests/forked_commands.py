"""Many commands through the real command line, each in a fork of one process that knows it all.

``python -m tests.forked_commands`` reads a `Case` a line, as JSON, and answers with an `Ended`. The
imports are paid for once, so that thousands of commands take minutes.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.conftest import REPOSITORY, TINY_JOB, command_environment

LIMIT = 120.0  # seconds for one command


@dataclass(frozen=True)
class Case:
    """The words behind ``tandem``, and what it has besides in its environment."""

    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How it ended: its exit code (128 + n by signal n, 124 out of time) and what it wrote."""

    code: int
    output: str
    errors: str

    @property
    def fault(self) -> str:
        """What no command may do, whatever it is given; empty if it did none of it."""
        if "Traceback" in self.output + self.errors:
            return "a traceback"
        if self.code not in (0, 1, 2, 75):
            return f"exit code {self.code}"
        said = [line for line in self.errors.splitlines() if not line.startswith("warning: ")]
        if self.code == 1 and not self.output and len(said) != 1:
            return f"{len(said)} lines"
        return ""


@contextmanager
def serving() -> Iterator[Callable[[Case], Ended]]:
    """A function that runs a case and says how it ended."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.forked_commands"],
        cwd=REPOSITORY,
        env=command_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        requests, replies = server.stdin, server.stdout

        def run(case: Case) -> Ended:
            print(json.dumps(asdict(case)), file=requests, flush=True)
            return Ended(**json.loads(replies.readline()))

        yield run
        requests.close()


def _import_everything() -> None:
    import torch

    torch.set_num_threads(1)  # a fork has only the thread that made it
    for package in ("commands", "configs", "data_pipeline", "model", "trainer", "cluster"):
        for module in pkgutil.walk_packages([str(REPOSITORY / package)], f"{package}."):
            if not module.name.endswith("wandb_follower"):
                importlib.import_module(module.name)
    from configs import loading
    from trainer.config import JobConfig
    from trainer.evaluation import final_scores

    loading.parse = functools.cache(loading.parse)
    loading.load(str(TINY_JOB), JobConfig, "job")  # each file of it is parsed once for all forks
    final_scores.SPEED_SECONDS = 0.0


def _run(case: Case) -> Ended:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            _become(case)
        code = _wait(pid)
        for file in (output, errors):
            file.seek(0)
        return Ended(code, _text(output.read()), _text(errors.read()))


def _become(case: Case) -> None:
    import tandem

    code = 70
    os.environ.update(case.environment)
    try:
        tandem.main(case.argv, prog_name="tandem")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code or 0)


def _wait(pid: int) -> int:
    """The exit code of a child, which is killed with all that it started when its time is up."""
    ended = os.pidfd_open(pid)
    in_time = bool(select.select([ended], [], [], LIMIT)[0])
    os.close(ended)
    if not in_time:
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return 124 if not in_time else code if code >= 0 else 128 - code


def _text(data: bytes) -> str:
    return data[-20_000:].decode("utf-8", "replace")


def main() -> None:
    """Answer the cases on standard input."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some imports have something to say
    os.chdir(tempfile.mkdtemp(prefix="commands-"))
    _import_everything()
    for line in sys.stdin:
        print(json.dumps(asdict(_run(Case(**json.loads(line))))), file=replies, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
