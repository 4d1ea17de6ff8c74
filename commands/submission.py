"""Commands for SLURM: submit a job, and show the status of runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.job_configs import load_job, warn_about
from commands.options import MAX_DIGITS, PATH
from configs.typed import shown

if TYPE_CHECKING:
    from trainer.config import JobConfig


def numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int]:
    """The seeds of an option such as 1,2,3, each named once."""
    found = [] if text is None else text.split(",")
    if not all(number.isdecimal() and len(number) <= MAX_DIGITS for number in found):
        raise click.BadParameter(f"{shown(text)}: must be numbers, such as 1,2,3")
    seeds = [int(number) for number in found]
    if len(set(seeds)) < len(seeds):
        raise click.BadParameter(f"{text}: name each seed once")
    return seeds


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=PATH)
@click.argument("rest", nargs=-1, metavar="[KEY=VALUE]... [--SBATCH-OPTION VALUE]...")
@click.option("--cluster", type=PATH, help="The cluster: a name or file of configs/cluster.")
@click.option("--seeds", callback=numbers, help="One run per seed, such as 1,2,3.")
@click.option(
    "--chain",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Submit this many jobs that follow each other, for queues without requeues.",
)
@click.option("--model", type=PATH, help="The folder of the model that a task fine-tunes.")
@click.option("--dry-run", is_flag=True, help="Only print the script.")
@click.option(
    "--check/--no-check", default=True, help="Whether to check first that the run can start."
)
def submit(
    config: str, rest: tuple[str, ...], model: str | None, check: bool, **options: Any
) -> None:
    """Submit the job CONFIG to SLURM, with any option of sbatch."""
    import configs
    from cluster.commands import submit as submit_job
    from trainer.run_folder.folder import RunFolder

    if config.startswith("-"):
        raise click.UsageError(f"{config}: put CONFIG before the options of sbatch")
    pairs = list(zip(rest, ("", *rest), strict=False))
    overrides = tuple(word for word, before in pairs if _is_override(word, before))
    if model is not None:  # and named as `tandem finetune` names its runs
        name = f"{Path(config).stem}-{Path(model).resolve().name}"
        words = {"teacher.init.pretrained": str(Path(model)), "name": name}
        overrides = (*(configs.assignment(*word) for word in words.items()), *overrides)
    sbatch = [word for word, before in pairs if not _is_override(word, before)]
    job = load_job(config, overrides)
    if check and not options["dry_run"]:
        _require_startable(job, options["seeds"])
    warn_about(job)
    run = RunFolder.of(job).path
    sizes = [job.batch.at(0).sequences, *(growth.size for growth in job.batch.growth)]
    batches = [size or job.batch.multiple for size in sizes]  # or stated in tokens
    submit_job(job.name, run, configs.dump(job), options=sbatch, batches=batches, **options)


def _require_startable(job: JobConfig, seeds: Sequence[int]) -> None:
    """Raise what would end each run of the job as it starts, if that can be known here.

    Raises LaunchError where no run has anything left to do.
    """
    from cluster import LaunchError
    from commands.training import final_results
    from trainer.lifecycle.start import require_startable
    from trainer.run_folder.folder import RunFolder

    runs = [replace(job, name=f"{job.name}-seed{seed}", seed=seed) for seed in seeds] or [job]
    unfinished = [run for run in runs if final_results(run) is None]
    if not unfinished:
        folders = ", ".join(str(RunFolder.of(run).path) for run in runs)
        raise LaunchError(f"{folders}: finished; for another run, give the job another name")
    for run in unfinished:
        require_startable(run)


def _is_override(word: str, before: str) -> bool:
    """Whether a word is a job's key=value, rather than an sbatch option or its value."""

    from trainer.config import JobConfig

    key, equals, _ = word.partition("=")
    if not equals or word.startswith("-"):
        return False
    may_be_a_value = before.startswith("--") and "=" not in before
    return not may_be_a_value or key.split(".")[0] in {
        one.name for one in dataclasses.fields(JobConfig)
    }


@click.command()
@click.argument("run", type=PATH, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(run: str | None, as_json: bool) -> None:
    """Show the status of RUN, or of every run in runs/."""
    from cluster.commands import status as show_status

    show_status(run, as_json)
