"""No option and no argument of any command takes an empty word for a value, or ignores it."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

import tandem

# Words that are keys of a config, options of sbatch or texts; who reads them says what is wrong.
FREE = {"overrides", "rest", "texts"}


def commands(group: click.Group, *above: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The words of each command, and the command."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)
        else:
            yield (*above, name), command


def valid(parameter: click.Parameter) -> str:
    """A value that the parameter's type takes."""
    kind = parameter.type
    if isinstance(kind, click.Choice):
        return str(kind.choices[0])
    return "1" if isinstance(kind, type(click.INT)) else "x"


def with_empty(command: click.Command, empty: click.Parameter) -> list[str]:
    """The required options and arguments, and `empty` with an empty word."""
    words = []
    for one in command.params:
        if one is empty or one.required:
            name = [one.opts[0]] if isinstance(one, click.Option) else []
            words += [*name, "" if one is empty else valid(one)]
    return words


CASES = [
    pytest.param(
        [*words, *with_empty(command, one)],
        one.get_error_hint(click.Context(command)),
        id=f"{' '.join(words)} {one.opts[0]}",
    )
    for words, command in commands(tandem.main)
    for one in command.params
    if one.name not in FREE and not getattr(one, "is_flag", False)
]


@pytest.mark.parametrize(("words", "named"), CASES)
def test_an_empty_word_is_wrong_usage(words: list[str], named: str) -> None:
    ended = CliRunner().invoke(tandem.main, words)
    assert ended.exit_code == 2, ended.output
    assert f"Invalid value for {named}" in ended.stderr
