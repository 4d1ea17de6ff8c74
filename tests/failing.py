"""Commands that must fail with one line."""

from __future__ import annotations

from click.testing import CliRunner

import tandem


def fails(*arguments: object) -> str:
    """The one line of a command that must fail, run in this process."""
    done = CliRunner().invoke(tandem.main, [str(argument) for argument in arguments])
    line = one_line(done.output)
    wrong_usage = line.startswith("tandem: --")
    assert done.exit_code == (2 if wrong_usage else 1), (done.output, done.exception)
    return line


def one_line(output: str) -> str:
    lines = output.strip().splitlines()
    assert len(lines) == 1, output
    return lines[0]
