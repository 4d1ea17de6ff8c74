"""The process behind `tests.fork_server`: it imports everything, and forks servers, which fork."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import math
import os
import pickle
import pkgutil
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from tests.fork_server import READY, REPOSITORY, START_SECONDS, Call, address

# What modules with functions for ranks import, and jobs where they score tags (4 s a process).
OF_TESTS = (
    *("pytest", "tests.conftest", "seqeval.metrics"),
    *("omegaconf", "attr", "tandem", "rich._emoji_codes", "torch.profiler._cupti_monitor"),
    # DeepSpeed's first engine takes a second for these.
    *("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_layer"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def import_everything() -> None:
    """Import all modules of the packages, and what torch and the tests import lazily."""
    import torch._dynamo  # noqa: F401

    for package in ("commands", "configs", "data_pipeline", "model", "trainer", "cluster"):
        for module in pkgutil.walk_packages([str(REPOSITORY / package)], f"{package}."):
            if not module.name.endswith("wandb_tracker"):
                importlib.import_module(module.name)
    for name in OF_TESTS:
        # A machine that runs the GPU tests alone may lack what other tests need.
        with contextlib.suppress(ModuleNotFoundError):
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
    from trainer.report.page import LiveReport

    final_scores.SPEED_SECONDS = 0.0
    LiveReport.refresh = lambda self: None  # type: ignore[method-assign]


def server_of_a_client(listener: socket.socket) -> socket.socket | None:
    """Fork a server for each client until all have ended; in one, return its client's requests."""
    began, servers = time.monotonic(), 0
    while servers or time.monotonic() - began < START_SECONDS:
        if select.select([listener], [], [], 0.2)[0]:
            requests = listener.accept()[0]
            if not _is_ours(requests):
                continue
            if os.fork() == 0:
                listener.close()
                requests.sendall(READY)
                return requests
            requests.close()
            servers += 1
            began = -math.inf
        servers -= _reap()
    return None


def _is_ours(connection: socket.socket) -> bool:
    """Whether this user has connected: whoever does can run anything."""
    other = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("3i", other)[1] == os.getuid()


def serve(requests: socket.socket) -> Call | None:
    """Fork for each request until the client has gone; returns, in a fork, what it has to call.

    The client is told each fork's process id and, once that has ended, how.
    """
    forks: dict[int, tuple[int, int]] = {}  # by descriptor of the process: its id, and the pipe
    while True:
        ready = select.select([requests.fileno(), *forks], [], [])[0]
        for fork in forks.keys() & {*ready}:
            _report(fork, *forks.pop(fork))
        if requests.fileno() not in ready:
            continue
        head, files, _, _ = socket.recv_fds(requests, 8, 3)
        if not head:
            return None
        data, size = b"", struct.unpack("Q", head)[0]
        while len(data) < size:  # and not a byte more: the next request may wait behind it
            data += requests.recv(size - len(data))
        output, errors, status = files
        pid = os.fork()
        if pid == 0:
            requests.close()
            for file in (status, *forks, *(pipe for _, pipe in forks.values())):
                os.close(file)
            _end_with_parent()
            os.setsid()
            _redirect(output, errors)
            call: Call = pickle.loads(data)
            return call
        forks[os.pidfd_open(pid)] = pid, status
        os.write(status, struct.pack("i", pid))
        for file in (output, errors):
            os.close(file)


def _report(fork: int, pid: int, status: int) -> None:
    """Tell the client how a fork has ended, unless it does not listen any more."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        os.write(status, struct.pack("i", code))
    for file in (fork, status):
        os.close(file)


def _reap() -> int:
    """How many children have ended since; their CPU time counts as this process's."""
    ended = 0
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            ended += 1
    return ended


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect(output: int, errors: int) -> None:
    for number, file in ((1, output), (2, errors)):
        os.dup2(file, number)
        os.close(file)


def main() -> None:
    """Import and serve; in a fork, do what was requested and exit."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address(sys.argv[1]))
    except OSError:  # another worker has started one
        return
    listener.listen()
    gc.disable()
    import_everything()
    gc.freeze()  # no collection in a fork looks at what was imported, whose pages it would copy
    gc.enable()
    requests = server_of_a_client(listener)
    call = serve(requests) if requests else None
    if call is None:
        os._exit(0)
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
