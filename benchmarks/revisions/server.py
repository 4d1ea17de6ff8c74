"""Runs the commands of one revision, each in a fork of a process that has imported what they need.

``python server.py CHECKOUT`` reads a request a line, as JSON (``{"argv": [...], "ranks": 2}``), and
answers with the exit code and the end of what was written to standard error. With `ranks` the
command runs as that many ranks, as under srun or torchrun. Which modules a command needs is not
known here: a child that had to import some names them, and the next one finds them imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

LIMIT = 900.0  # seconds for one command
GRACE = 10.0  # seconds for the other ranks to end once one has failed


def main() -> None:
    """Answer the requests on standard input."""
    sys.path[0] = sys.argv[1]  # instead of this file's folder
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), file=replies, flush=True)


def answer(argv: Sequence[str], ranks: int) -> dict[str, Any]:
    """Run ``tandem ARGV``, as `ranks` ranks or, if 0, as a command of its own."""
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        environments = rank_environments(ranks, port) if ranks else [{}]
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in environments]
        imported = stack.enter_context(tempfile.TemporaryFile())
        reports = [imported, *[None] * (len(environments) - 1)]
        ranks_files = zip(environments, errors, reports, strict=True)
        children = [start(argv, *of_rank) for of_rank in ranks_files]
        codes = wait_for(children)
        import_all(text(imported).split())
        failed = [rank for rank, code in codes.items() if code]  # in the order of their ends
        said = [text(errors[rank])[-4000:] for rank in failed]
        return {
            "code": codes[failed[0]] if failed else 0,
            "errors": next(filter(None, said), ""),  # others fail because of one, silently
        }


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port below those of client sockets that others leave alone for the block.

    It is bound, but nobody listens; with SO_REUSEADDR the ranks' store may.
    """
    with socket.socket() as holder:
        while True:
            with contextlib.suppress(OSError):
                holder.bind(("", random.randrange(16000, 32000)))
                break
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield int(holder.getsockname()[1])


def rank_environments(ranks: int, port: int) -> list[dict[str, str]]:
    """The environment that a launcher gives each of the ranks of one machine."""
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def start(
    argv: Sequence[str],
    environment: Mapping[str, str],
    errors: IO[bytes],
    imported: IO[bytes] | None,
) -> int:
    """The process id of a fork that runs the command, in a session of its own.

    It writes the modules that it had to import to `imported`, if there is such a file.
    """
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(errors.fileno(), 2)
    os.environ.update(environment)
    known = set(sys.modules)
    code = 70
    try:
        code = run(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        if imported is not None:
            needed = [name for name in sys.modules if name not in known]
            os.write(imported.fileno(), "\n".join(needed).encode())
        sys.stderr.flush()
        os._exit(code)


def run(argv: Sequence[str]) -> int:
    """The exit code of the command line."""
    from tandem import main as tandem

    do_not_measure_speed()
    try:
        tandem(list(argv), prog_name="tandem")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def do_not_measure_speed() -> None:
    """Models' speeds are no result; where measuring them has a duration, it becomes 0."""
    for module in list(sys.modules.values()):
        if hasattr(module, "SPEED_SECONDS"):
            module.SPEED_SECONDS = 0.0  # type: ignore[attr-defined]


def wait_for(children: Sequence[int]) -> dict[int, int]:
    """Rank -> exit code, in the order in which they ended; those that hang are killed."""
    waiting = {os.pidfd_open(pid): rank for rank, pid in enumerate(children)}
    codes: dict[int, int] = {}
    deadline = time.monotonic() + LIMIT
    while waiting:
        ended = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))[0]
        for file in ended or list(waiting):
            rank = waiting.pop(file)
            if not ended:
                os.killpg(children[rank], signal.SIGKILL)
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(children[rank], 0)[1])
            os.close(file)
            if codes[rank]:
                deadline = min(deadline, time.monotonic() + GRACE)
    return codes


def import_all(names: Sequence[str]) -> None:
    """Import modules that a child had to, as far as they are modules of files."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def text(file: IO[bytes]) -> str:
    """The text that was written to a file."""
    file.seek(0)
    return file.read().decode("utf-8", "replace")


if __name__ == "__main__":
    main()
