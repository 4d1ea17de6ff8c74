"""A hanging test fails with its location, its processes are killed, and the next test runs.

`pytest-timeout` interrupts the test's own Python code. The processes that the test has started are
killed first, since the interrupted code may close a pipe to them, or wait for them again. A test
that hangs outside Python ends its process instead (`faulthandler_timeout`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

SLOW_SECONDS = 1800  # for one slow test, with the fixtures that it is the first to need


@pytest.hookimpl
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests more time."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Iterator[Any]:
    """Make the alarm kill the test's processes before it fails the test."""
    result = yield
    began, fail = time.time(), signal.getsignal(signal.SIGALRM)

    def kill_and_fail(number: int, frame: Any) -> None:
        kill_children_since(began)
        fail(number, frame)

    if callable(fail):
        signal.signal(signal.SIGALRM, kill_and_fail)
    return result


def kill_children_since(began: float) -> None:
    """Kill every process below this one that is younger than `began`, a time since the epoch."""
    for child in psutil.Process().children(recursive=True):
        try:
            if child.create_time() >= began - 1.0:  # the kernel's clock ticks coarsely
                child.kill()
        except psutil.NoSuchProcess:
            continue
