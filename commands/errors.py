"""Errors on the command line."""

from __future__ import annotations

import errno
import sys
from typing import Any

import click

FAILED = 1


class OneLineErrors(click.Group):
    """Turns what a user can fix into one line and exit code 1; anything else is a bug and shows."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except Exception as error:
            message = _one_line(error)
            if message is None:
                raise
            click.echo(f"tandem: {message}", err=True)
            context.exit(FAILED)


def _one_line(error: Exception) -> str | None:
    """The message for an error that is the user's to fix, None for a bug of ours."""
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EPERM
    ):  # fmt: skip
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}; make room or choose another folder"
    user_errors = [
        getattr(sys.modules[module], name)
        for module, name in [
            ("configs", "ConfigError"),
            ("data_pipeline", "DataError"),
            ("model", "ModelError"),
            ("cluster", "LaunchError"),
            ("trainer.errors", "TrainingError"),
            ("trainer.checkpoint.errors", "CheckpointError"),
        ]
        if module in sys.modules
    ]
    if isinstance(error, tuple(user_errors)):
        return " ".join(str(error).split())
    return None
