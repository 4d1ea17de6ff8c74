"""A revision, checked out beside this one, and its commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("server.py")


class CommandFailed(Exception):
    """A command of a revision that should have ended with 0."""


@dataclass(frozen=True)
class Checkout:
    """A revision whose commands can be run, and the folder of what they make."""

    revision: str
    code: Path
    made: Path
    server: subprocess.Popen[str]

    @property
    def commit(self) -> str:
        """Its short hash and subject."""
        return git("-C", str(self.code), "log", "-1", "--format=%h %s")

    def tandem(self, *argv: object, ranks: int = 0) -> None:
        """Run a command, as `ranks` ranks if there are any.

        Raises:
            CommandFailed: with the end of its standard error.
        """
        reply = self._ask([str(word) for word in argv], ranks)
        if reply["code"]:
            words = f"{self.revision}: tandem {argv[0]} {argv[1]}"
            raise CommandFailed(f"{words} ends with {reply['code']}: {reply['errors']}")

    def accepts(self, job: str, override: str) -> bool:
        """Whether the schema of this revision takes an override of a job."""
        words = ["submit", job, "data.path=corpus", override, "--dry-run"]
        return bool(self._ask(words, 0)["code"] == 0)

    def _ask(self, argv: list[str], ranks: int) -> dict[str, int | str]:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps({"argv": argv, "ranks": ranks}), file=self.server.stdin, flush=True)
        line = self.server.stdout.readline()
        if not line:
            raise CommandFailed("the process that runs its commands has ended")
        reply: dict[str, int | str] = json.loads(line)
        return reply


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Checkout]:
    """Check a revision out into `folder`, for the block; what it makes goes there, too."""
    code, made = folder / "code", folder / "made"
    made.mkdir(parents=True)
    git("worktree", "add", "--quiet", "--detach", str(code), revision)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("SLURM")},
        "PYTHONPATH": str(code),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "WANDB_MODE": "disabled",
    }
    try:
        with subprocess.Popen(
            [sys.executable, str(SERVER), str(code)],
            cwd=made,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            yield Checkout(revision, code, made, server)
    finally:
        git("worktree", "remove", "--force", str(code))


def git(*words: str) -> str:
    """The output of git, run in this repository."""
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()
