"""User errors as one line; bugs as tracebacks.

Opening a named pipe is such an error: a command that reads one would wait for a writer, perhaps for
ever.
"""

import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import click

from commands.ending import open_closed_streams
from configs.errors import UserError
from configs.kinds import in_plugin

FAILED = 1
INTERRUPTED = "tandem: interrupted"  # sys.exit prints it, with exit code 1
LONGEST = 2000  # characters of a message
ADVICE = {
    errno.ENOSPC: "free some space, or choose another folder",
    errno.EDQUOT: "free some space, or choose another folder",
    errno.EROFS: "choose another folder",
    errno.EACCES: "change its permissions, or choose another folder",
    errno.EPERM: "change its permissions, or choose another folder",
}
_commands: list[None] = []  # those that run in this process


class OneLineErrors(click.Group):
    """Prints an error that the user can fix as one line; bugs are re-raised.

    Above the traceback of an exception in a plugin stands a line that names its place.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the command line. An interruption here is told as one of the command."""
        open_closed_streams()
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except OSError as error:  # of standard output, where the help goes
            if (message := one_line(error)) is None:
                raise
            _end_output()
            sys.exit(f"tandem: {message}")

    def invoke(self, context: click.Context) -> Any:
        """Run the command. Characters that the terminal's encoding lacks are written as escapes."""
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            from configs.progress import shown

            with shown(), pipes_refused():
                return super().invoke(context)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except EOFError as error:  # click would take it for the end of terminal input
            raise RuntimeError("a file ended early") from error
        except Exception as error:
            message = one_line(error)
            if message is None:
                if place := in_plugin(error):
                    click.echo(f"tandem: {one_line(place)}", err=True)
                raise
            _end_output()
            click.echo(f"tandem: {message}", err=True)
            context.exit(getattr(error, "exit_code", FAILED))


def _end_output() -> None:
    """Write what standard output still holds, or drop it: Python would fail at it again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(error: Exception) -> str | None:
    """The message of an error that the user can fix; None for a bug.

    The middle of a message is left out where it quotes a damaged file at length.
    """
    message = _message(error)
    if message is None or len(message) <= LONGEST:
        return message
    return f"{message[: LONGEST // 2]} [...] {message[-LONGEST // 4 :]}"


def _message(error: Exception) -> str | None:
    if isinstance(error, UserError):
        return " ".join(str(error).split())
    if isinstance(error, BrokenPipeError) and not error.filename:
        return None  # the reader of our output has gone; click handles it
    if isinstance(error, OSError):
        return _system_error(error)
    if isinstance(error, MemoryError):
        return f"out of memory: {str(error) or 'the machine has too little'}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported for this
        said = str(error).partition(" Of the allocated memory")[0]
        remedy = "set CUDA_VISIBLE_DEVICES to another one, or to nothing for the CPU"
        return f"{said.rstrip('.')}; end what else computes on that GPU, or {remedy}"
    return None


def _system_error(error: OSError) -> str:
    names = [str(name) for name in (error.filename, error.filename2) if name]
    if names and error.errno in (errno.ENOTDIR, errno.EEXIST):
        from data_pipeline.shards.writing import file_above

        if file := file_above(Path(names[-1])):
            return f"{file}: is a file, where a folder is needed"
    reason = error.strerror or str(error) or type(error).__name__
    advice = ADVICE.get(error.errno or 0)
    words = f"{' to '.join(names)}{': ' if names else ''}{reason}{f'; {advice}' if advice else ''}"
    return " ".join(words.split())


@contextmanager
def pipes_refused() -> Iterator[None]:
    """Within, opening a named pipe to read it raises OSError, in whichever library.

    A shell's pipes (/dev/fd/63) have a writer. Those that are opened to be written may be output.
    """
    _add_hook()
    _commands.append(None)
    try:
        yield
    finally:
        _commands.pop()


@cache
def _add_hook() -> None:
    sys.addaudithook(_check)  # cannot be removed


def _check(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _commands:
        return
    path, _, flags = arguments
    if flags & os.O_ACCMODE == os.O_WRONLY or not isinstance(path, (str, bytes)):
        return
    name = os.fsdecode(path)
    if _is_pipe(name) and not name.startswith(("/dev/", "/proc/")):
        raise OSError(errno.EINVAL, "is a pipe; write its content to a file", name)


def _is_pipe(name: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(name).st_mode)
    except (OSError, ValueError):
        return False
