"""Several ranks of one job on this machine, without SLURM or torchrun.

torchrun would do, but it prints every rank's traceback, retries nothing useful on one machine and
turns a polite exit (75) into a failure. What this one promises instead:

- One error is shown: that of the rank that failed first, or, where that one ended without a word,
  of the first that said something (ranks that only echo another's failure keep silent).
- A signal reaches each rank once, although a terminal's Ctrl-C goes to a whole process group:
  every rank has a session of its own.
- No rank outlives the launcher, not even a SIGKILLed one (the kernel's parent-death signal).
- Rank 0 writes to the terminal itself, so a live progress display works. Its standard error is
  passed on after a moment, lest it shows the echo of another rank's failure first.

A rank is a fork of the launcher. On a CPU it runs what the launcher has imported, so that a job
imports once; where there are GPUs, whose libraries do not survive a fork, it becomes a new program.
"""

import atexit
import collections
import contextlib
import ctypes
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

from cluster.ranks import (
    OUTCOME,
    RESTARTS,
    STOP_SIGNALS,
    Ranks,
    export,
    hang_up_is_stop,
    reserved_port,
)
from configs.errors import OptionError
from configs.runs import STOPPED

GRACE_SECONDS = 5.0  # for the other ranks to end by themselves once one has failed
MOST_RANKS = 1024  # on one machine: signals are blocked while they are forked
HUNG = ": no progress for watch.hang_timeout_s; each rank's log has its stacks"
KILLED = ", perhaps because the memory ran out; start it again to resume"
HOLD_SECONDS = 0.5  # how long rank 0's standard error waits before it is shown
KEPT_BYTES = 64 * 1024  # of each rank's standard error, its end

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded before any fork


@dataclass
class _Child:
    rank: int
    pid: int
    errors: int  # where its standard error is read
    code: int = 0  # once it has ended: its exit code, or -n by signal n
    held: collections.deque[tuple[float, bytes]] = field(default_factory=collections.deque)
    shown: bytes = b""  # the end of what was passed on of its standard error


def launch(
    rank: Callable[[], int],
    nproc: int,
    grace: float = GRACE_SECONDS,
    one_of_several: bool = False,
    restarts: int = 0,
    before_restart: Callable[[], None] = lambda: None,
) -> int:
    """Fork `nproc` ranks, and return an exit code: in each of them, what `rank` returns there.

    The launcher returns the job's. It is 0 when all ranks end well, 75 when they stopped on
    request, the code of the rank that failed first otherwise (128 + n after signal n), and 130
    after a second Ctrl-C. It is 75 too where the job is `one_of_several`, so that others would
    follow, and all ranks ended well although they were asked to stop. Once a rank has failed the
    others get `grace` seconds to end, and are then killed. Call from the main thread, before
    anything has started threads that a rank needs.

    Up to `restarts` times, all ranks are started again after a signal has ended one, unless they
    were asked to stop; `before_restart` is called first.
    """
    if not 1 <= nproc <= MOST_RANKS:
        raise OptionError(f"--nproc {nproc}: must be at least 1 and at most {MOST_RANKS:,}")
    launcher = _Launcher(grace, one_of_several)
    code = launcher.run(nproc)
    for restart in range(1, restarts + 1):
        if code is None or not launcher.was_killed:
            break
        left = restarts - restart
        print(f"starting the ranks again (--max-restarts: {left} left)", file=sys.stderr)
        before_restart()
        launcher = _Launcher(grace, one_of_several, restart)
        code = launcher.run(nproc)
    return rank() if code is None else code


def becoming(argv: list[str]) -> Callable[[], int]:
    """A rank that becomes the program `argv`."""

    def become() -> int:
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)

    return become


def leave(code: int) -> NoReturn:
    """Exit with `code` once what is registered with `atexit` is done, and not one module dropped.

    Dropping them takes a fork half a second, since it copies each page of memory that it touches.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class _Launcher:
    def __init__(self, grace: float, one_of_several: bool, restart: int = 0) -> None:
        self.grace, self.one_of_several, self.restart = grace, one_of_several, restart
        self.children: list[_Child] = []
        self.running: list[_Child] = []
        self.failed: list[_Child] = []  # in the order in which they ended
        self.deadline = float("inf")  # when the remaining ranks are killed
        self.received: collections.deque[int] = collections.deque()
        self.forwarded: set[int] = set()
        self.interrupted = False

    @property
    def was_killed(self) -> bool:
        """Whether the job failed by a signal to a rank that did not come through the launcher."""
        return bool(self.failed) and self.failed[0].code < 0 and not self.forwarded

    def run(self, nproc: int) -> int | None:
        """The job's exit code, or None in a rank."""
        with (
            selectors.DefaultSelector() as selector,
            self._signals(selector) as unblocked,
            reserved_port() as port,
        ):
            try:
                for rank in range(nproc):
                    ranks = Ranks(rank, nproc, rank, nproc, 0, "127.0.0.1", port)
                    if not self._fork(ranks):
                        return None
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
                for child in self.children:
                    os.set_blocking(child.errors, False)
                    selector.register(child.errors, selectors.EVENT_READ, child)
                while self.running:
                    self._wait(selector)
                    self._forward()
                    self._reap()
                    if self.interrupted or time.monotonic() >= self.deadline:
                        self._kill_all()
            finally:
                self._kill_all()
        return self._finish()

    def _fork(self, ranks: Ranks) -> bool:
        """Start a rank; whether this is still the launcher."""
        launcher = os.getpid()
        errors, its_errors = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # else both would write what is left in it
        pid = os.fork()
        if pid == 0:
            _tie_to(launcher)
            _redirect(ranks.rank, its_errors)
            _set_environment(ranks, self.restart)
            self._forget()
        else:
            os.close(its_errors)
            child = _Child(ranks.rank, pid, errors)
            self.children.append(child)
            self.running.append(child)
        return pid != 0

    def _forget(self) -> None:
        """Forget, in a rank, the ranks before it: they are not its own."""
        for child in self.children:
            os.close(child.errors)
        self.children.clear()
        self.running.clear()

    @contextlib.contextmanager
    def _signals(self, selector: selectors.BaseSelector) -> Iterator[set[int]]:
        """Note signals as they come, and have each of them wake the selector.

        They are blocked at first: the launcher sets the mask that this yields once it has forked
        the ranks. A rank leaves the block with the handlers from before, and with the stop signals
        blocked until it has its own (see cluster.ranks).
        """
        caught = [*STOP_SIGNALS, signal.SIGCHLD] + [signal.SIGHUP] * hang_up_is_stop()
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        selector.register(reader, selectors.EVENT_READ, None)
        previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, caught)
        previous = {number: signal.signal(number, self._receive) for number in caught}
        launcher = os.getpid()
        try:
            yield mask
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous_fd)
            blocked = mask if os.getpid() == launcher else mask.union(STOP_SIGNALS)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(reader)
            os.close(writer)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.received.append(number)

    def _wait(self, selector: selectors.BaseSelector) -> None:
        """Sleep until a signal, some output, or the next deadline; collect the output."""
        now = time.monotonic()
        held = self.children[0].held
        until = min(self.deadline, held[0][0] + HOLD_SECONDS if held else float("inf"))
        for key, _ in selector.select(None if until == float("inf") else max(0.0, until - now)):
            data = os.read(key.fd, 1 << 16)
            if key.data is None:
                continue
            if data:
                _hold(key.data, data)
            else:
                selector.unregister(key.fileobj)
        if not self.failed:
            _show(self.children[0], older_than=time.monotonic() - HOLD_SECONDS)

    def _forward(self) -> None:
        while self.received:
            number = self.received.popleft()
            if number == signal.SIGHUP:  # the terminal was closed
                number = signal.SIGTERM
            if number in self.forwarded:
                self.interrupted |= number == signal.SIGINT
                continue
            if number == signal.SIGINT:
                print("stopping where it can resume; Ctrl-C again ends it at once", file=sys.stderr)
            self.forwarded.add(number)
            for child in self.running:
                os.kill(child.pid, number)

    def _reap(self) -> None:
        for child in list(self.running):
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            if ended.si_code != os.CLD_EXITED or ended.si_status not in (0, STOPPED):
                # Kill what it left behind. Its id is not used again before it is reaped.
                with contextlib.suppress(ProcessLookupError):  # it may not have its group yet
                    os.killpg(child.pid, signal.SIGKILL)
                if not self.failed:
                    self.deadline = time.monotonic() + self.grace
                self.failed.append(child)
            _collect(child)
            self.running.remove(child)
            if child in self.failed:
                for other in self.running:  # a stopped one could not say where it is
                    os.kill(other.pid, signal.SIGCONT)

    def _kill_all(self) -> None:
        """Kill every rank with what it started in its session, and wait for the ranks."""
        for child in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in self.running:
            _collect(child)
        self.running.clear()

    def _finish(self) -> int:
        """Show the standard error of the rank to blame, else of rank 0; return the exit code."""
        for child in self.children:
            with contextlib.suppress(BlockingIOError):
                while data := os.read(child.errors, 1 << 16):
                    _hold(child, data)
            os.close(child.errors)
        self.failed.sort(key=_may_be_an_echo)
        shown = self._to_blame()
        if self.interrupted:
            return 128 + signal.SIGINT
        # Ranks that fail alike: rank 0's line may have been passed on before another one ended.
        if not _told(self.children[0], shown):
            _show(shown)
        if not self.failed:
            asked = STOPPED if self.one_of_several and self.forwarded else 0
            return max(asked, *(child.code for child in self.children))
        code = self.failed[0].code
        if code < 0:
            number = signal.Signals(-code)
            why = {signal.SIGALRM: HUNG, signal.SIGKILL: KILLED}.get(number, "")
            print(f"rank {self.failed[0].rank} was ended by {number.name}{why}", file=sys.stderr)
            return 128 - code
        return code

    def _to_blame(self) -> _Child:
        """Whose standard error explains how the job ended; rank 0's where none failed."""
        if not self.failed:
            return self.children[0]
        if self.failed[0].code < 0:
            return self.failed[0]
        return next((child for child in self.failed if child.held), self.failed[0])


def _tie_to(launcher: int) -> None:
    """Make a rank end with its launcher, but without what a terminal sends to that one."""
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before the line above
        os._exit(128 + signal.SIGKILL)


def _redirect(rank: int, errors: int) -> None:
    """Give a rank nothing to read; rank 0 alone writes; errors go to the launcher."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    if rank != 0:
        os.dup2(nothing, 1)
    os.dup2(errors, 2)
    os.close(nothing)
    os.close(errors)


def _set_environment(ranks: Ranks, restart: int) -> None:
    export(ranks)
    if restart:  # a request to stop that nobody has answered still holds
        os.environ[RESTARTS] = str(restart)
    os.environ.pop(OUTCOME, None)  # that of the launcher
    threads = len(os.sched_getaffinity(0)) // ranks.local_world_size
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a hostname need not resolve on a laptop


def _may_be_an_echo(child: _Child) -> bool:
    """Whether another rank's end can be why it ended: not if a signal ended it, but for `abort`.

    One that a signal ends loses its connections first, so that others may be gone before it is.
    """
    return child.code >= 0 or child.code == -signal.SIGABRT


def _collect(child: _Child) -> None:
    child.code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])


def _hold(child: _Child, data: bytes) -> None:
    child.held.append((time.monotonic(), data))
    while sum(len(kept) for _, kept in child.held) > KEPT_BYTES and len(child.held) > 1:
        child.held.popleft()


def _show(child: _Child, older_than: float = float("inf")) -> None:
    while child.held and child.held[0][0] <= older_than:
        data = child.held.popleft()[1]
        sys.stderr.buffer.write(data)
        child.shown = (child.shown + data)[-KEPT_BYTES:]
    sys.stderr.flush()


def _told(first: _Child, child: _Child) -> bool:
    """Whether rank 0 has already said, word for word, what `child` is about to say."""
    message = b"".join(data for _, data in child.held).strip()
    return first is not child and bool(message) and message in first.shown
