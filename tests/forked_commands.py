"""Many commands through the real command line, checked for what no command may do."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.conftest import command_environment
from tests.fork_server import run_command

LIMIT = 120.0  # seconds for one command
KEPT = 20_000  # characters of what it writes, the last ones


@dataclass(frozen=True)
class Case:
    """The words after ``tandem``, and additions to its environment."""

    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """The result: its exit code (128 + n for signal n, 124 for a timeout) and its output."""

    code: int
    output: str
    errors: str

    @property
    def fault(self) -> str:
        """What no command may do, whatever it is given; empty if it did none of it."""
        if "Traceback" in self.output + self.errors:
            return "a traceback"
        if self.code not in (0, 1, 2, 75):
            return f"exit code {self.code}"
        said = [line for line in self.errors.splitlines() if not line.startswith("warning: ")]
        if self.code == 1 and not self.output and len(said) != 1:
            return f"{len(said)} lines"
        return ""


def run(case: Case) -> Ended:
    """Run a case in a fork; returns how it ended."""
    environment = command_environment(**case.environment)
    code, output, errors = run_command(case.argv, environment, LIMIT)
    return Ended(code, output[-KEPT:], errors[-KEPT:])
