"""Commands about runs: submit to SLURM, status, stop, checkpoint, fork and sync."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.job_configs import load_job, prepare, warn_about
from commands.options import (
    MODEL,
    PATH,
    SUITE_OUT,
    TEXT,
    UNTRAINED,
    Number,
    numbers,
    refuse_set_twice,
)
from commands.suite_runs import prepare_suite
from commands.suites import default_folder

if TYPE_CHECKING:
    from cluster.script import Work
    from trainer.config import JobConfig

# What each command may be given; a suite is what `evaluate --suite` compares.
OPTIONS = {
    "train": {"model", "store", "seeds"},
    "finetune": {"model", "store", "seeds"},
    "store": {"model"},
    "evaluate": set(),
    "suite": {"suite", "out", "untrained", "seeds"},
}


@dataclass(frozen=True)
class _Submission:
    """A job for SLURM: a config, the folder of the job's records, and its stages."""

    name: str
    run: Path
    config: str
    work: Work
    seeds: Sequence[int] = ()
    batches: Sequence[int] = ()


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument(
    "words",
    type=PATH,
    nargs=-1,
    required=True,
    metavar="CONFIG [KEY=VALUE]... [--SBATCH-OPTION VALUE]...",
)
@click.option(
    "--cluster",
    type=PATH,
    help="The cluster: a name or file of configs/cluster. Default: one node without GPUs.",
)
@click.option("--seeds", callback=numbers, help="One run per seed, such as 1,2,3.")
@click.option(
    "--chain",
    type=click.IntRange(min=1),
    default=1,
    help="Submit this many jobs, each after the one before, for queues without requeues.",
)
@click.option("--model", type=PATH, help="The folder of the model that a task fine-tunes.")
@click.option(
    "--store", is_flag=True, help="In the same job, store the teacher's predictions first."
)
@click.option("--suite", type=PATH, help="The suite on which `submit evaluate` compares DIRs.")
@SUITE_OUT
@UNTRAINED
@click.option("--dry-run", is_flag=True, help="Only print the script.")
@click.option(
    "--check/--no-check", default=True, help="Whether to check first that the run can start."
)
def submit(
    words: tuple[str, ...],
    cluster: str | None,
    chain: int,
    dry_run: bool,
    check: bool,
    **given: Any,
) -> None:
    """Submit the job CONFIG to SLURM, with any option of sbatch.

    To submit another command, write its name: `tandem submit store CONFIG`, `submit evaluate RUN`
    or `submit evaluate --suite SUITE DIR...`. Give names and keys before the options of sbatch.
    """
    from cluster.commands import refuse_options
    from cluster.commands import submit as submit_job

    command, words = (words[0], words[1:]) if words[0] in OPTIONS else ("train", words)
    kind = "suite" if command == "evaluate" and given["suite"] else command
    for option in sorted({name for name, value in given.items() if value} - OPTIONS[kind]):
        raise click.UsageError(f"--{option} does not go with `tandem submit {command}`")
    names = _names(words, kind)
    rest = [*words]
    for name in names:  # the first of its kind: an option's value behind it may be the same word
        rest.remove(name)
    pairs = list(zip(rest, ("", *rest), strict=False))
    overrides = tuple(word for word, before in pairs if _is_override(word, before))
    sbatch = [word for word, before in pairs if not _is_override(word, before)]
    check = check and not dry_run
    if check:
        refuse_options(cluster, sbatch)
    if kind == "suite":
        made = _suite(names, overrides, check, **given)
    elif kind == "evaluate":
        made = _evaluation(names, overrides, check)
    else:
        made = _job(names, overrides, check, command, **given)
    submit_job(cluster=cluster, options=sbatch, chain=chain, dry_run=dry_run, **vars(made))


def _names(words: Sequence[str], kind: str) -> list[str]:
    """The CONFIG, RUN or DIRs among the words of a command, which come before its options."""
    first = itertools.takewhile(lambda word: not word.startswith("-"), words)
    names = [word for word in first if "=" not in word or Path(word).exists()]
    if not names:
        raise click.UsageError(
            f"{words[0]}: put CONFIG before the options of sbatch" if words else "name a CONFIG"
        )
    return names if kind == "suite" else names[:1]


def _job(
    names: Sequence[str],
    overrides: tuple[str, ...],
    check: bool,
    command: str,
    model: str | None,
    store: bool,
    seeds: Sequence[int],
    **_: Any,
) -> _Submission:
    """The job of `tandem train` or `store`, or of both one after the other."""
    import configs
    from cluster.script import Work
    from trainer.run_folder.folder import RunFolder

    (config,) = names
    refuse_set_twice(overrides, {"--model": model, "--seeds": seeds})
    if store and seeds:
        raise click.UsageError(
            "--store: does not go with --seeds, because each seed has another order of data"
        )
    if model is not None:  # and named as `tandem finetune` names its runs
        name = f"{Path(config).stem}-{Path(model).resolve().name}"
        words = {MODEL: str(Path(model)), "name": name}
        overrides = (*(configs.assignment(*word) for word in words.items()), *overrides)
    job = load_job(config, overrides)
    stages = ("store",) * (store or command == "store") + ("train",) * (command != "store")
    if "store" in stages and job.teacher.stored is None:
        raise configs.ConfigError("teacher.stored: must be set: a path, top_k and precision")
    job = prepare(job) if check else job
    if check and "train" in stages:
        _require_startable(job, seeds, stores_first=store)
    elif check:
        from trainer.job_data.fit import require_inputs

        require_inputs(job)
    warn_about(job)
    run, stored = RunFolder.of(job).path, job.teacher.stored if "store" in stages else None
    work = Work(stages, stored.path if stored else "")
    if "train" not in stages:
        run = run.with_name(f"{job.name}-store")
    batch = job.batch_sizes
    sizes = [batch.at(0).sequences, *(growth.size for growth in batch.growth)]
    batches = [size or job.batch.multiple for size in sizes]  # or stated in tokens
    return _Submission(run.name, run, configs.dump(job), work, seeds, batches)


def _suite(
    names: Sequence[str],
    overrides: tuple[str, ...],
    check: bool,
    suite: str,
    out: str | None,
    untrained: bool,
    seeds: Sequence[int],
    **_: Any,
) -> _Submission:
    """The comparison of models by `tandem evaluate --suite`, with a copy of the suite."""
    import configs
    from cluster.script import Work
    from configs.suites import SuiteConfig

    config = configs.dump(configs.load(suite, SuiteConfig, "suite"))
    folder = Path(out or default_folder(suite))
    if check:
        prepare_suite(suite, names, folder, overrides, seeds, untrained)
    arguments = [*names, *overrides, "--out", str(folder)]
    arguments += ["--seeds", ",".join(map(str, seeds))] if seeds else []
    arguments += ["--untrained"] if untrained else []
    work = Work(("evaluate",), suite=Path(suite).stem, arguments=tuple(arguments))
    return _Submission(folder.resolve().name, folder, config, work)


def _evaluation(names: Sequence[str], overrides: tuple[str, ...], check: bool) -> _Submission:
    """The scores of a run by `tandem evaluate`; they are in the job's log."""
    from cluster.script import Work
    from trainer.evaluation.finished import SavedLearners
    from trainer.run_folder.folder import RunFolder

    if overrides:
        raise click.UsageError(f"{overrides[0]}: a run is scored as it was configured; remove it")
    folder = RunFolder.existing(names[0])
    if check:
        SavedLearners(folder)
    path = folder.path.resolve()
    run = path.with_name(f"{path.name}-evaluate")
    work = Work(("evaluate",), arguments=(str(path),))
    return _Submission(run.name, run, folder.config.read_text(encoding="utf-8"), work)


def _require_startable(job: JobConfig, seeds: Sequence[int], stores_first: bool) -> None:
    """Raise the error that would end each run of the job at its start, if it can be known here.

    Raises LaunchError if no run has anything left to do.
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
        require_startable(run, stores_first)


def _is_override(word: str, before: str) -> bool:
    """Whether a word is a job's key=value, rather than an sbatch option or its value."""
    from trainer.config import JobConfig

    key, equals, _ = word.partition("=")
    if not equals or word.startswith("-"):
        return False
    may_be_a_value = before.startswith("-") and "=" not in before
    return not may_be_a_value or key.split(".")[0] in {
        field.name for field in dataclasses.fields(JobConfig)
    }


@click.command(hidden=True)
@click.argument("run", type=PATH)
@click.argument("gpus", type=int)
@click.argument("min_free_gb", type=float)
def preflight(run: str, gpus: int, min_free_gb: float) -> None:
    """Check this node; the batch script of a job runs it on each, before the ranks."""
    from cluster.preflight import main as check

    sys.exit(check(Path(run), gpus, min_free_gb))


@click.command()
@click.argument("run", type=PATH, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(run: str | None, as_json: bool) -> None:
    """Show the status of RUN, or of every run in runs/."""
    from cluster.commands import status as show_status

    show_status(run, as_json)


_WAIT = click.option(
    "--wait",
    type=Number(0),
    default=120.0,  # twice what NFS may take to show a new file to another node, and more
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
    from trainer.checkpoint.attempts import live_owner
    from trainer.run_folder.folder import RunFolder

    folder = RunFolder.begun(run)
    is_live = live_owner(folder.path) is not None
    lines, has_started = cancel_waiting(folder.path, is_live)
    for line in lines:
        click.echo(line)
    if not lines or has_started or is_live:
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

    Every key may change except the shape of the teacher. The tokenizer stays, too.
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
    from trainer.record.recorder import sync as sync_run
    from trainer.run_folder.folder import RunFolder

    click.echo(sync_run(RunFolder.existing(run)))
