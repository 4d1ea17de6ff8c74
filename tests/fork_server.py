"""Processes that start with everything imported: forks of a process that has imported it once.

``server().start(function, *args)`` calls a module level function in a new process, with this
process's folder and module path. The server runs no tensor operation, so that a fork can start
threads. ZeRO-3 patches functions of torch for the whole process: here, for one fork only.

One process imports for all workers of a test session. It forks a server for each worker; that one
forks the processes, waits for them and reports their ends. A server and all of its forks end with
their worker, and the process that has imported ends with the last of its servers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).parents[1]
START_SECONDS = 180.0  # for the imports, on a loaded machine
READY = b"!"  # the first and only word of a server


@dataclass(frozen=True)
class Call:
    """What a fork has to do, and where."""

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

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._importing: subprocess.Popen[bytes] | None = None  # if no other worker has started it
        self._requests = self._connect()
        atexit.register(self.close)

    def _connect(self) -> socket.socket:
        """A connection to a new server of this session's process that imports."""
        name = os.environ.get("PYTEST_XDIST_TESTRUNUID") or f"{os.getpid()}-{secrets.token_hex(8)}"
        while True:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(START_SECONDS)
            try:
                connection.connect(address(name))
                if connection.recv(len(READY)):
                    connection.settimeout(None)
                    return connection
            except (ConnectionRefusedError, ConnectionResetError):  # not there yet, or at its end
                pass
            connection.close()
            if self._importing is None or self._importing.poll() == 0:  # or another came first
                self._importing = _import(name)
            assert not self._importing.poll(), "the process that imports for tests has failed"
            time.sleep(0.02)

    @property
    def is_there(self) -> bool:
        return not select.select([self._requests], [], [], 0)[0]  # it says nothing, but ends

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
        call = Call(
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
            self._requests.shutdown(socket.SHUT_WR)
        select.select([self._requests], [], [], 60)
        self._requests.close()


def address(name: str) -> str:
    """Where the process that imports for the test session of this name meets its clients."""
    return f"\0tandem-tests-{name}"  # abstract: it is gone with its process


def _import(name: str) -> subprocess.Popen[bytes]:
    changes = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.forking", name],
        cwd=REPOSITORY,
        env={**os.environ, **changes, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


_server: ForkServer | None = None


def server() -> ForkServer:
    """This process's server, which is started on first use."""
    global _server
    if _server is None or not _server.is_there:
        _server = ForkServer()
    return _server


def run_command(
    arguments: list[str], environment: Mapping[str, str], seconds: float
) -> tuple[int, str, str]:
    """The exit code of ``tandem ARGUMENTS`` (128 + n by signal n, 124 out of time), and its words.

    What it writes comes as standard output and standard error.
    """
    command = Program(command_line, arguments, environment=environment)
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
    ) -> None:
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  as it lives
        output, errors = (file.fileno() for file in self._files)
        self._forked = server().start(
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
