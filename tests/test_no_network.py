"""A job asks no other machine for anything. W&B's own process: tests/trainer/test_tracking.py."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import command_environment
from tests.faults.jobs import arguments, as_rank, end
from tests.fork_server import Program

HOST = {"socket.connect": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}  # its argument
ELSEWHERE = "192.0.2.1"  # nobody's, by RFC 5737
OWN = {None, "", "localhost", socket.gethostname()}


def is_elsewhere(host: str | None) -> bool:
    try:
        return host not in OWN and not ipaddress.ip_address(host or "").is_loopback
    except ValueError:  # a name
        return True


def watch(record: Path) -> None:
    """Refuse connections of this process to other machines, and name them in `record`."""

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event not in HOST or (event == "socket.connect" and args[0].family == socket.AF_UNIX):
            return
        place = args[HOST[event]]
        if is_elsewhere(place[0] if isinstance(place, tuple) else place):
            with record.open("a") as file:
                print(event, place, file=file)
            raise ConnectionError(f"{event}: {place} is not this machine")

    sys.addaudithook(audit)


def connect() -> None:
    with socket.socket() as one:
        one.connect((ELSEWHERE, 9))


def look_up() -> None:
    socket.getaddrinfo("name.invalid", 9)


def suppressed(prepare: Callable[[], object], call: Callable[[], object]) -> None:
    """As a library that can do without a network calls it."""
    prepare()
    with contextlib.suppress(OSError):
        call()


def test_a_job_of_one_rank_connects_to_this_machine_only(corpus: Path, tmp_path: Path) -> None:
    record = tmp_path / "connections"
    words = [*arguments(corpus, tmp_path, "steps=2"), "--nproc", "1"]
    environment = command_environment()
    code, errors = end(Program(as_rank, partial(watch, record), words, environment=environment))
    assert code == 0, errors
    assert (tmp_path / "tiny" / "exports" / "teacher").exists()
    assert not record.exists(), record.read_text()


@pytest.mark.parametrize(("call", "seen"), [(connect, "connect"), (look_up, "getaddrinfo")])
def test_what_a_library_hides_is_seen(
    call: Callable[[], object], seen: str, tmp_path: Path
) -> None:
    record = tmp_path / "connections"
    prepare = partial(watch, record)
    end(Program(suppressed, prepare, call, environment=command_environment()))
    assert record.read_text().startswith(f"socket.{seen} ")
