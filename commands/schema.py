"""The command for editors: the JSON schema of a job whose plugins add keys."""

from __future__ import annotations

import json

import click

from commands.options import PATH


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
