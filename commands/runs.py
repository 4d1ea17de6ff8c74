"""Commands that act on a run: stop, checkpoint, fork, sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from commands.options import PLACE, Number

if TYPE_CHECKING:
    pass


_WAIT = click.option(
    "--wait", type=Number(), default=60.0, show_default=True, help="Seconds, for its answer."
)


@click.command()
@click.argument("run", type=PLACE)
@_WAIT
def stop(run: str, wait: float) -> None:
    """Have the job that is at work in RUN save and end, from any node, and its chain with it."""
    from cluster.commands import cancel_waiting
    from trainer.checkpoint import live_owner
    from trainer.run_folder.folder import RunFolder

    folder = RunFolder.submitted(run)
    lines, has_started = cancel_waiting(folder.path)
    for line in lines:
        click.echo(line)
    if not lines or has_started or live_owner(folder.path):
        _ask(run, "stop", wait)


@click.command()
@click.argument("run", type=PLACE)
@_WAIT
def checkpoint(run: str, wait: float) -> None:
    """Have the job that is at work in RUN save now and go on."""
    _ask(run, "checkpoint", wait)


def _ask(run: str, kind: str, wait: float) -> None:
    from trainer.control.asking import ask_and_wait
    from trainer.run_folder.folder import RunFolder

    click.echo(ask_and_wait(RunFolder.existing(run), kind, wait))


@click.command("fork")
@click.argument("run", type=PLACE)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--step", type=int, required=True, help="Of the checkpoint to begin with.")
@click.option("--name", required=True, help="The new run's.")
def fork_run(run: str, overrides: tuple[str, ...], step: int, name: str) -> None:
    """Make a new run from a checkpoint of RUN; any key of its config may differ."""
    from trainer.lifecycle.forking import fork
    from trainer.run_folder.folder import RunFolder

    made = fork(RunFolder.existing(run), step, name, overrides)
    for line in made.changes:
        click.echo(line)
    for learner in made.begin_anew:
        click.echo(f"{learner} stays behind; if the config names it, it begins anew")
    click.echo(f"Go on with it: tandem train {made.folder.config}")


@click.command()
@click.argument("run", type=PLACE)
def sync(run: str) -> None:
    """Make Weights & Biases agree with RUN's metrics.jsonl; offline without a key."""
    from trainer.record.syncing import sync as sync_run
    from trainer.run_folder.folder import RunFolder

    click.echo(sync_run(RunFolder.existing(run)))
