"""Processes that start with everything imported: forks of a server that has imported it once.

``server().start(function, *args)`` calls a module level function in a new process, with this
process's folder and module path. The server runs no tensor operation, so that a fork can start
threads. ZeRO-3 patches functions of torch for the whole process: here, for one fork only.

The server forks a guardian, which forks the process, waits for it and reports its end. All of them
end with the process that made the request.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import pkgutil
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

REPOSITORY = Path(__file__).parents[1]
START_SECONDS = 180.0  # for the imports, on a loaded machine
# What modules with functions for ranks import, and jobs where they score tags (4 s a process).
OF_TESTS = (
    *("pytest", "tests.conftest", "seqeval.metrics"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class _Call:
    environment: dict[str, str]
    folder: str
    module_path: list[str]
    function_and_arguments: bytes


@dataclass
class Forked:
    """A process that a server has forked: `pid` and, once it has ended, `returncode`."""

    pid: int
    _status: int
    returncode: int | None = field(default=None)  # -n by signal n

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or None if it is still running after `seconds`."""
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            data = os.read(self._status, 4)
            self.returncode = struct.unpack("i", data)[0] if data else -signal.SIGKILL
            os.close(self._status)
        return self.returncode

    def kill(self) -> None:
        """Kill it together with everything that it has started in its session."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and is not known to have
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(60)


class ForkServer:
    """A process that has done the slow imports, and forks on request."""

    def __init__(self, prepare: str = "") -> None:
        """`prepare` names a function (module:function) that the server calls after its imports."""
        self._owner = os.getpid()
        self._requests, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), prepare],
                pass_fds=[theirs.fileno()],
                cwd=REPOSITORY,
                env={**environment, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self.close)

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def start(
        self,
        function: Callable[..., object],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        output: int = 1,
        errors: int = 2,
    ) -> Forked:
        """Call ``function(*arguments)`` in a fork, in this folder, that writes to these files."""
        call = _Call(
            dict(os.environ if environment is None else environment),
            str(folder or os.getcwd()),
            sys.path,
            pickle.dumps((function, arguments)),
        )
        status, its_status = os.pipe()
        data = pickle.dumps(call)
        message = struct.pack("Q", len(data))
        socket.send_fds(self._requests, [message], [output, errors, its_status])
        self._requests.sendall(data)
        os.close(its_status)
        assert select.select([status], [], [], START_SECONDS)[0], "the fork server does not answer"
        return Forked(struct.unpack("i", os.read(status, 4))[0], status)

    def close(self) -> None:
        """End the server and all of its processes."""
        if os.getpid() != self._owner:  # a fork of this process, at its own end
            return
        with contextlib.suppress(OSError):  # it has ended already
            self._requests.shutdown(socket.SHUT_RDWR)
        self._requests.close()
        self._process.wait(60)


_server: ForkServer | None = None


def server() -> ForkServer:
    """This process's server, which is started on first use."""
    global _server
    if _server is None or not _server.is_there:
        _server = ForkServer()
    return _server


def run_command(
    arguments: list[str],
    environment: Mapping[str, str],
    seconds: float,
    through: ForkServer | None = None,
) -> tuple[int, str, str]:
    """The exit code of ``tandem ARGUMENTS`` (128 + n by signal n, 124 out of time), and its words.

    What it writes comes as standard output and standard error.
    """
    command = Program(command_line, arguments, environment=environment, through=through)
    try:
        output, errors = command.communicate(seconds)
    except subprocess.TimeoutExpired:
        command.kill()
        return 124, *command.communicate(0)
    code = command.wait(0)
    return code if code >= 0 else 128 - code, output, errors


class Program:
    """A function in a fork, met as ``subprocess.Popen`` meets a program."""

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: Any,
        environment: Mapping[str, str],
        folder: Path | None = None,
        through: ForkServer | None = None,
    ) -> None:
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  as it lives
        output, errors = (file.fileno() for file in self._files)
        self._forked = (through or server()).start(
            function,
            *arguments,
            environment=environment,
            folder=folder,
            output=output,
            errors=errors,
        )
        self.args, self.pid = [function.__name__, *map(str, arguments)], self._forked.pid

    @property
    def returncode(self) -> int | None:
        return self._forked.returncode

    def poll(self) -> int | None:
        return self._forked.wait(0)

    def wait(self, timeout: float) -> int:
        code = self._forked.wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Its standard output and standard error, once it has ended."""
        self.wait(timeout)
        output, errors = map(_written, self._files)
        return output, errors

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """With all that it has started in its session."""
        self._forked.kill()


def _written(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def command_line(arguments: list[str]) -> None:
    """Run `tandem` as a shell would."""
    import tandem

    sys.argv = ["tandem", *arguments]
    tandem.main(arguments, prog_name="tandem")


def import_everything() -> None:
    """Import all modules of the packages, and what torch and the tests import lazily."""
    import torch._dynamo  # noqa: F401

    for package in ("commands", "configs", "data_pipeline", "model", "trainer", "cluster"):
        for module in pkgutil.walk_packages([str(REPOSITORY / package)], f"{package}."):
            if not module.name.endswith("wandb_follower"):
                importlib.import_module(module.name)
    from trainer.learners.uncompiled import import_muon

    import_muon()  # DeepSpeed does with every first engine of a process, in 1.4 s
    for name in OF_TESTS:
        importlib.import_module(name)
    _remember_what_every_job_reads()
    _spare_what_no_test_reads()


def _remember_what_every_job_reads() -> None:
    """The schema of jobs, the files of the tiny one, and which operators DeepSpeed can build."""
    import deepspeed.ops

    from configs import loading
    from tests.conftest import TINY_JOB
    from trainer.config import JobConfig

    loading.load(str(TINY_JOB), JobConfig, "job")
    assert deepspeed.ops.__compatible_ops__


def _spare_what_no_test_reads() -> None:
    """Of each job: two speeds of each learner, and a process that writes the report meanwhile.

    Jobs that tests start as programs do both.
    """
    from trainer.evaluation import final_scores
    from trainer.report.refreshing import LiveReport

    final_scores.SPEED_SECONDS = 0.0
    LiveReport.refresh = lambda self: None  # type: ignore[method-assign]


def serve(requests: socket.socket) -> _Call | None:
    """Fork for each request until no client is left; returns, in a fork, what it has to call."""
    while True:
        head, files, _, _ = socket.recv_fds(requests, 8, 3)
        _collect_guardians()
        if not head:
            return None
        data, size = b"", struct.unpack("Q", head)[0]
        while len(data) < size:  # and not a byte more: the next request may wait behind it
            data += requests.recv(size - len(data))
        if os.fork() == 0:
            requests.close()
            _end_with_parent()
            return _guard(pickle.loads(data), *files)
        for file in files:
            os.close(file)


def _guard(call: _Call, output: int, errors: int, status: int) -> _Call:
    """Fork once more; the guardian reports that process's id and end, and never returns."""
    pid = os.fork()
    if pid == 0:
        os.close(status)
        _end_with_parent()
        os.setsid()
        _redirect(output, errors)
        return call
    for file in (output, errors):
        os.close(file)
    os.write(status, struct.pack("i", pid))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(status, struct.pack("i", code))
    os._exit(0)


def _collect_guardians() -> None:
    """Reap guardians that have ended, so that their CPU time counts as this process's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect(output: int, errors: int) -> None:
    for number, file in ((1, output), (2, errors)):
        os.dup2(file, number)
        os.close(file)


def main() -> None:
    """Import, prepare and serve; in a fork, do what was requested and exit."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    import_everything()
    if sys.argv[2]:
        module, _, name = sys.argv[2].partition(":")
        getattr(importlib.import_module(module), name)()
    gc.freeze()  # no collection in a fork looks at what was imported, whose pages it would copy
    gc.enable()
    call = serve(requests)
    if call is not None:
        os.environ.clear()
        os.environ.update(call.environment)
        os.chdir(call.folder)
        sys.path[:] = call.module_path
        function, arguments = pickle.loads(call.function_and_arguments)
        _call_and_leave(function, arguments)


def _call_and_leave(function: Callable[..., object], arguments: tuple[Any, ...]) -> NoReturn:
    """Call the function, and exit at once with the code with which it would have exited."""
    from cluster.local import leave

    code: Any = None
    try:
        function(*arguments)
    except SystemExit as exit_:
        code = exit_.code
    if not isinstance(code, int | None):
        sys.exit(code)
    leave(code or 0)


if __name__ == "__main__":
    main()
