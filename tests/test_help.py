"""What the command line says of itself: help, version, shell completion."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from tandem import main
from tests.conftest import REPOSITORY, tandem

CUT_SHORT = re.compile(r"[^\].A-Z]\.\.\.")  # other dots than those of "[KEY=VALUE]..." and "DIR..."


def every_command(group: click.Group, *above: str) -> Iterator[list[str]]:
    yield [*above]
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from every_command(command, *above, name)
        else:
            yield [*above, name]


@pytest.mark.parametrize("words", list(every_command(main)), ids=" ".join)
def test_no_help_is_cut_short_at_80_columns(words):
    shown = CliRunner().invoke(main, [*words, "--help"], terminal_width=80)
    assert shown.exit_code == 0
    assert max(map(len, shown.output.splitlines())) <= 80
    assert not CUT_SHORT.search(shown.output), shown.output
    wide = CliRunner().invoke(main, [*words, "--help"], terminal_width=2000, max_content_width=2000)
    words_at = [re.sub(r"-\s+", "-", done.output).split() for done in (shown, wide)]
    assert words_at[0] == words_at[1], "no word is broken but at a hyphen"


def test_the_version_is_that_of_the_project():
    project = (REPOSITORY / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"$', project, re.M)
    assert version is not None
    assert tandem("--version").stdout == f"tandem {version[1]}\n"


def test_bash_completes_commands_and_options():
    page = (REPOSITORY / "docs/first_run.md").read_text()
    assert 'eval "$(_TANDEM_COMPLETE=bash_source tandem)"' in page
    assert "_tandem_completion" in tandem(_TANDEM_COMPLETE="bash_source").stdout
    completed = tandem(_TANDEM_COMPLETE="bash_complete", COMP_WORDS="tandem tok", COMP_CWORD="1")
    assert completed.stdout == "plain,tokenizer\n"
    files = tandem(_TANDEM_COMPLETE="bash_complete", COMP_WORDS="tandem train my", COMP_CWORD="2")
    assert files.stdout == "file,my\n"
