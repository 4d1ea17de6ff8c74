"""Option types that click lacks, and options of several commands."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

import configs
from configs.typed import shown


class Number(click.FloatRange):
    """A number in a range; click's own range accepts NaN."""

    name = "number"

    def convert(self, value: Any, *context: Any) -> float:
        number: float = super().convert(value, *context)
        if math.isnan(number):
            self.fail(f"{value} is not a number", *context)
        return number


MODEL = "teacher.init.pretrained"  # the key of a job that --model sets
MAX_DIGITS = 18  # a number of this many digits fits into 64 bits


class NotEmpty(click.ParamType):  # type: ignore[type-arg]  # generic in new releases only
    """Any text but an empty one; `name` is what the help calls it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: Any, *context: Any) -> str:
        """The text unchanged."""
        if not value:
            self.fail("must not be empty", *context)
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Leave a path to the shell, which completes the names of files."""
        return [CompletionItem(incomplete, type="file")] if self.name == "path" else []


class Encoding(click.ParamType):  # type: ignore[type-arg]
    """The name of a text encoding that Python knows."""

    name = "encoding"

    def convert(self, value: Any, *context: Any) -> str:
        """The name unchanged."""
        from configs.rules import TEXT_ENCODING

        if not TEXT_ENCODING.allows(value):
            self.fail(f"{value!r}: must be {TEXT_ENCODING.words}", *context)
        return str(value)


def _print_version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    from importlib.metadata import PackageNotFoundError, version

    from configs.runs import DISTRIBUTION

    if not asked or context.resilient_parsing:
        return
    try:
        click.echo(f"tandem {version(DISTRIBUTION)}")
    except PackageNotFoundError:
        click.echo("tandem, of a version that only `pip install` notes")
    context.exit()


def _load_plugins(context: click.Context, parameter: click.Parameter, paths: Sequence[str]) -> None:
    if not paths or context.resilient_parsing:
        return
    from trainer.tasks import load_plugins

    load_plugins(paths)


VERSION = click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
PATH = NotEmpty("path")  # a file, a folder, or the name of a run or config
TEXT = NotEmpty("text")
ENCODING = Encoding()
FRACTION = Number(0, 1)
POSITIVE = Number(0, 1e9, min_open=True)
SEPARATOR = click.option(
    "--separator",
    type=TEXT,
    help="The line between documents, or 'line': each line is one. Default: blank lines.",
)
PLUGINS = click.option(
    "--plugin",
    type=PATH,
    multiple=True,
    expose_value=False,
    callback=_load_plugins,
    metavar="FILE",
    help="A Python file that the model needs, as `plugins` of its training. May be repeated.",
)
FIELD = click.option(
    "--field",
    "text_field",
    type=TEXT,
    help="Key or column of the text; a.b if nested. Default: text.",
)
NPROC = click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Processes on this machine. Default: one for each GPU, or one.",
)
SUITE_OUT = click.option(
    "--out",
    type=PATH,
    help="The folder for the runs and the report of a suite. [runs/suites/SUITE]",
)
UNTRAINED = click.option(
    "--untrained",
    is_flag=True,
    help="Also compare with the first DIR's architecture with random weights.",
)


def parse_pair(text: str, separator: str, option: str) -> tuple[int, int]:
    """Two numbers with a separator between them, such as 0:4."""
    first, _, last = text.partition(separator)
    if not (first.isdecimal() and last.isdecimal() and max(len(first), len(last)) < MAX_DIGITS):
        raise click.UsageError(f"{option} {text}: must be two numbers, as in 0{separator}4")
    return int(first), int(last)


def numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int]:
    """The seeds of an option such as 1,2,3, each named once."""
    words = [] if text is None else text.split(",")
    if not all(number.isdecimal() and len(number) <= MAX_DIGITS for number in words):
        raise click.BadParameter(f"{shown(text)}: must be numbers, such as 1,2,3")
    seeds = [int(number) for number in words]
    if len(set(seeds)) < len(seeds):
        raise click.BadParameter(f"{text}: name each seed once")
    return seeds


def assignments(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The values of nested sections as ``key=value``; those by step or layer stay together."""
    for key, value in tree.items():
        if isinstance(value, dict) and value and not all(map(str.isdecimal, value)):
            yield from assignments(value, f"{above}{key}.")
        else:
            yield configs.assignment(f"{above}{key}", value)


def refuse_set_twice(overrides: Sequence[str], options: Mapping[str, object]) -> None:
    """Raise UsageError for a key of the job that an option sets too.

    options: the values of ``--model`` and ``--seeds``, by these words; a false one is not given.
    """
    keys = {MODEL: "--model", "seed": "--seeds"}
    for word in assignments(configs.assigned(overrides)):  # teacher.init={pretrained: x} too
        key = word.partition("=")[0]
        if options.get(option := keys.get(key, "")):
            raise click.UsageError(f"{key}: {option} sets this; give only one of the two")
