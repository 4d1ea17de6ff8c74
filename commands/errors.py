"""Errors on the command line."""

from __future__ import annotations

import errno
import sys
from typing import Any

import click

FAILED = 1
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM)
USER_ERRORS = [
    ("configs", "ConfigError"),
    ("data_pipeline", "DataError"),
    ("model", "ModelError"),
    ("cluster", "LaunchError"),
    ("trainer.errors", "TrainingError"),
    ("trainer.checkpoint.errors", "CheckpointError"),
]


class OneLineErrors(click.Group):
    """Turns what a user can fix into one line and exit code 1; anything else is a bug and shows."""

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(context)
        except EOFError as error:  # which click takes for the end of a person's input
            raise RuntimeError("a file ended early") from error
        except Exception as error:
            message = one_line(error)
            if message is None:
                raise
            click.echo(f"tandem: {message}", err=True)
            context.exit(FAILED)


def one_line(error: Exception) -> str | None:
    """The message for an error that is the user's to fix, None for a bug of ours."""
    loaded = [pair for pair in USER_ERRORS if pair[0] in sys.modules]
    if isinstance(error, tuple(getattr(sys.modules[module], name) for module, name in loaded)):
        return " ".join(str(error).split())
    if isinstance(error, BrokenPipeError) and not error.filename:
        return None  # whoever read our output has gone, which click knows
    if isinstance(error, OSError):
        return _of_the_system(error)
    if isinstance(error, MemoryError):
        return f"out of memory: {str(error) or 'the machine has too little'}"
    return None


def _of_the_system(error: OSError) -> str:
    names = [str(name) for name in (error.filename, error.filename2) if name]
    reason = error.strerror or str(error) or type(error).__name__
    advice = "; make room or choose another folder" if error.errno in NO_ROOM else ""
    return " ".join(f"{' to '.join(names)}{': ' if names else ''}{reason}{advice}".split())
