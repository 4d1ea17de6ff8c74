"""Commands that act on a run: stop, checkpoint, fork and sync."""

from __future__ import annotations

import shlex

import click

from commands.options import PATH, TEXT, Number

_WAIT = click.option(
    "--wait",
    type=Number(0),
    default=120.0,  # twice what NFS may take to show a new file to another node, and more
    show_default=True,
    help="Seconds to wait for an answer.",
)


@click.command()
@click.argument("run", type=PATH)
@_WAIT
def stop(run: str, wait: float) -> None:
    """Make the job of RUN save and end, from any node.

    If the job is one of a chain (`submit --chain`), the following jobs are cancelled.
    """
    from cluster.commands import cancel_waiting
    from trainer.checkpoint import live_owner
    from trainer.run_folder.folder import RunFolder

    folder = RunFolder.begun(run)
    lines, has_started = cancel_waiting(folder.path)
    for line in lines:
        click.echo(line)
    if not lines or has_started or live_owner(folder.path):
        _ask(run, "stop", wait)


@click.command()
@click.argument("run", type=PATH)
@_WAIT
def checkpoint(run: str, wait: float) -> None:
    """Make the job of RUN save now, and continue."""
    _ask(run, "checkpoint", wait)


def _ask(run: str, kind: str, wait: float) -> None:
    from trainer.control import ask_and_wait
    from trainer.run_folder.folder import RunFolder

    click.echo(ask_and_wait(RunFolder.begun(run), kind, wait))


@click.command("fork")
@click.argument("run", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--step", type=int, required=True, help="The step of the checkpoint to start from.")
@click.option("--name", type=TEXT, required=True, help="The new run's name.")
def fork_run(run: str, overrides: tuple[str, ...], step: int, name: str) -> None:
    """Create a run from a checkpoint of RUN, with other settings.

    Every key may change except the shape of the teacher.
    """
    from trainer.lifecycle.forking import fork
    from trainer.run_folder.folder import RunFolder

    made = fork(RunFolder.existing(run), step, name, overrides)
    for line in made.changes:
        click.echo(line)
    for learner in made.begin_anew:
        click.echo(f"{learner} is not copied; if the config names it, it starts from the beginning")
    click.echo(f"To train it: tandem train {shlex.quote(str(made.folder.config))}")


@click.command()
@click.argument("run", type=PATH)
def sync(run: str) -> None:
    """Send RUN's metrics to Weights & Biases and its other trackers.

    Without a key of Weights & Biases the result is a complete offline folder.
    """
    from trainer.record.syncing import sync as sync_run
    from trainer.run_folder.folder import RunFolder

    click.echo(sync_run(RunFolder.existing(run)))
