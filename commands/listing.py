"""The commands that list what is shipped, by name, and the keys of a job for editors."""

import json
import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import click

from commands.options import PATH

# The kinds of shipped files, as the command names them, and their folders in configs/.
FILES = {
    "models": "model",
    "jobs": "job",
    "tasks": "task",
    "data": "data",
    "clusters": "cluster",
    "devices": "device",
    "suites": "suite",
}
REGISTRIES = ("terms", "optimizers", "schedules", "trackers")
LONGEST = 120  # characters of a line that is not cut at a colon or semicolon
# A mark behind a word, before a capital: none of "et al.", "eq. 7" or "a . b".
_SENTENCE = re.compile(r".+?(?:(?<=\S)(?<!\bal)[.?](?=\s+[A-Z`*|(]|\s*$)|$)")


@click.command("list")
@click.argument("kind", type=click.Choice([*FILES, *REGISTRIES]), required=False, metavar="[KIND]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_names(kind: str | None, as_json: bool) -> None:
    """List the shipped models, jobs, tasks, terms and so on.

    KIND is models, jobs, tasks, data, clusters, devices, suites, terms, optimizers, schedules or
    trackers. With it, each name has a line that describes it.
    """
    from configs.strict_json import strict_json

    entries = {name: _entries(name) for name in ([kind] if kind else [*FILES, *REGISTRIES])}
    if as_json:
        click.echo(strict_json(entries[kind] if kind else entries))
        return
    formatter = click.HelpFormatter(max_width=100)
    if kind:
        formatter.write_dl(list(entries[kind].items()))
    else:
        for name, lines in entries.items():
            formatter.write_text(f"{name}: {', '.join(lines)}")
        formatter.write_text(f"`tandem list {next(iter(FILES))}` says what each of them is.")
    click.echo(formatter.getvalue(), nl=False)


@click.command("schema")
@click.argument("plugins", type=PATH, nargs=-1)
def print_schema(plugins: tuple[str, ...]) -> None:
    """Print the JSON schema of a job, for editors.

    It includes the keys that PLUGINS (Python files) add. With it, an editor completes and checks
    job files; docs/reference.md says how.
    """
    from commands.reference import schema_of
    from trainer.config import JobConfig
    from trainer.tasks import load_plugins

    load_plugins(plugins)
    click.echo(json.dumps(schema_of("job", JobConfig), indent=2))


def _entries(kind: str) -> Mapping[str, str]:
    """The names of a kind, each with its line."""
    from configs import SHIPPED
    from configs.reference import purpose

    if kind in FILES:
        files = sorted((SHIPPED / FILES[kind]).glob("*.yaml"))
        return {path.stem: first_sentence(_comment(path.read_text("utf-8"))) for path in files}
    return {name: first_sentence(purpose(schema)) for name, schema in _registry(kind).items()}


def _registry(kind: str) -> Mapping[str, Any]:
    """The classes of a registry, by name."""
    from configs.kinds import kinds_of

    if kind == "terms":
        import trainer.tasks
        from trainer.objectives.term import registered_terms

        return registered_terms()
    if kind == "optimizers":
        import trainer.optimizers.kinds
        from trainer.optimizers.config import OptimizerConfig

        return kinds_of(OptimizerConfig)
    if kind == "trackers":
        import trainer.tracking.kinds  # noqa: F401 - registers them
        from trainer.tracking.trackers import registered_trackers

        return registered_trackers()
    from trainer.schedules import ScheduleConfig

    return kinds_of(ScheduleConfig)


def _comment(text: str) -> str:
    """The comment that opens a file, up to its first example of a command, on one line."""
    opening = takewhile(lambda line: line.startswith("#"), text.splitlines())
    lines = [line[2:] for line in opening if "yaml-language-server" not in line]
    commands = [number for number, line in enumerate(lines) if line.startswith(" ")]
    return " ".join(lines[: commands[0] if commands else None])


def first_sentence(text: str) -> str:
    """The first sentence of a text, without a mark at its end; a long one, up to a colon in it."""
    match = _SENTENCE.match(text)
    sentence = match[0] if match else ""
    marks = [mark.start() for mark in re.finditer("[:;] ", sentence[:LONGEST])]
    if len(sentence) > LONGEST and marks:
        sentence = sentence[: marks[-1]]
    return sentence.rstrip(".: ")
