"""The command line: one thin layer over the packages, which it imports when a command needs them.

Exit codes: 0 done; 1 failed, with one line that says what to change; 2 wrong usage; 75 stopped on
request after saving (start it again).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands import data
from commands.errors import OneLineErrors
from commands.job_configs import load_job, models
from commands.options import PLACE, POSITIVE, Number
from commands.output import drop_what_cannot_be_written

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.config import JobConfig


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Pre-train a BERT-family teacher and distil students from it, in one job."""


main.add_command(data.tokenizer)
main.add_command(data.data)


@main.command()
@click.argument("config", type=PLACE)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--nproc", type=click.IntRange(min=1), help="Processes on this machine.")
def train(config: str, overrides: tuple[str, ...], nproc: int | None) -> None:
    """Run the job CONFIG, or go on with it; under srun or torchrun as one of their ranks."""
    from cluster.local import launch
    from cluster.ranks import is_launched

    drop_what_cannot_be_written()
    if is_launched():
        if nproc is not None:
            raise click.UsageError("--nproc: srun or torchrun has started the processes already")
        sys.exit(_train_as_rank(lambda: load_job(config, overrides)))
    job = load_job(config, overrides)
    if _announce_if_finished(job):
        return
    argv = [sys.executable, "-m", "tandem", "train", config, *overrides]
    sys.exit(launch(argv, nproc or _default_processes()))


def _train_as_rank(load: Callable[[], JobConfig]) -> int:
    from cluster.ranks import derive, export, incarnation
    from cluster.signals import StopRequest

    with StopRequest() as stop:
        export(derive())
        from trainer.run import run_job

        job, restart = incarnation()
        ended = run_job(load, lambda: stop.requested, _announce, scheduled_as=job, restart=restart)
        return ended.value


def _announce(folder: Any, results: dict[str, Any]) -> None:
    from trainer.report import student_table

    click.echo(student_table(results))
    click.echo(f"\nReport: {folder.report}")


def _announce_if_finished(job: JobConfig) -> bool:
    """Say where the results are when there is nothing left to do but what is missing of them."""
    from trainer.run_folder.folder import RunFolder
    from trainer.run_folder.run_files import read_evaluation

    folder = RunFolder.of(job)
    results = read_evaluation(folder.evaluation)
    if results is None or results["step"] < job.steps:
        return False
    click.echo(f"{folder.path} is finished.\n")
    if not (folder.has_final_report() and all(map(folder.has_export, results["learners"]))):
        from trainer.lifecycle.finalize import finalize

        results = finalize(folder)
    _announce(folder, results)
    return True


def _default_processes() -> int:
    """One for each GPU, else one."""
    import torch

    return max(1, torch.cuda.device_count())


def _numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int]:
    numbers = text.split(",") if text else []
    if not all(number.isdecimal() for number in numbers):
        raise click.BadParameter(f"{text}: must be numbers, as in 1,2,3")
    return [int(number) for number in numbers]


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=PLACE)
@click.argument("rest", nargs=-1, metavar="[KEY=VALUE]... [--SBATCH-OPTION VALUE]...")
@click.option("--cluster", help="A name or file of configs/cluster.")
@click.option("--seeds", callback=_numbers, help="One run for each, as in 1,2,3.")
@click.option("--chain", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--dry-run", is_flag=True, help="Only print the script.")
@click.option("--check/--no-check", default=True, help="Look for corpora and weights from here.")
def submit(config: str, rest: tuple[str, ...], check: bool, **options: Any) -> None:
    """Hand the job CONFIG to SLURM; any option of sbatch may be given."""
    import configs
    from cluster.commands import submit as submit_job
    from trainer.job_data.fit import require_inputs
    from trainer.run_folder.folder import RunFolder

    if config.startswith("-"):
        raise click.UsageError(f"{config}: CONFIG comes before the options of sbatch")
    pairs = list(zip(rest, ("", *rest), strict=False))
    overrides = tuple(word for word, before in pairs if _is_override(word, before))
    sbatch = [word for word, before in pairs if not _is_override(word, before)]
    job = load_job(config, overrides)
    if check and not options["dry_run"]:
        require_inputs(job)
    _warn_of_unreached(job)
    run = RunFolder.of(job).path
    sizes = [job.batch.size, *(growth.size for growth in job.batch.growth)]
    batches = [size or job.batch.multiple for size in sizes]  # or stated in tokens
    submit_job(job.name, run, configs.dump(job), options=sbatch, batches=batches, **options)


def _warn_of_unreached(job: JobConfig) -> None:
    from trainer.lifecycle import unreached

    if late := unreached.warning(job):
        click.echo(f"warning: {late}", err=True)


def _is_override(word: str, before: str) -> bool:
    """Whether a word is key=value of a job, and not an option of sbatch or the value of one."""
    import dataclasses

    from trainer.config import JobConfig

    key, equals, _ = word.partition("=")
    if not equals or word.startswith("-"):
        return False
    may_be_a_value = before.startswith("--") and "=" not in before
    return not may_be_a_value or key.split(".")[0] in {
        one.name for one in dataclasses.fields(JobConfig)
    }


@main.command()
@click.argument("run", type=PLACE, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(run: str | None, as_json: bool) -> None:
    """Show how RUN goes, or every run in runs/."""
    from cluster.commands import status as show_status

    show_status(run, as_json)


_WAIT = click.option(
    "--wait", type=Number(), default=60.0, show_default=True, help="Seconds, for its answer."
)


@main.command()
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


@main.command()
@click.argument("run", type=PLACE)
@_WAIT
def checkpoint(run: str, wait: float) -> None:
    """Have the job that is at work in RUN save now and go on."""
    _ask(run, "checkpoint", wait)


def _ask(run: str, kind: str, wait: float) -> None:
    from trainer.control.asking import ask_and_wait
    from trainer.run_folder.folder import RunFolder

    click.echo(ask_and_wait(RunFolder.existing(run), kind, wait))


@main.command("fork")
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


@main.command("model")
@click.argument("config", type=PLACE)
@click.option("--length", type=click.IntRange(min=1), help="Tokens of a sequence, for the FLOPs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def describe_models(config: str, length: int | None, as_json: bool) -> None:
    """Count parameters, bytes and FLOPs of a model CONFIG, or of each model of a job."""
    import dataclasses

    from configs.strict_json import strict_json
    from model import describe

    found = {name: describe(one, length or its) for name, one, its in models(config)}
    if as_json:
        plain = {name: dataclasses.asdict(size) for name, size in found.items()}
        click.echo(strict_json(plain if len(plain) > 1 else next(iter(plain.values()))))
        return
    for name, size in found.items():
        click.echo(
            f"{name}: {size.parameters:,} parameters and {size.head_parameters:,} of its heads, "
            f"{size.bytes / 2**20:,.0f} MiB in float32, {size.flops_per_token / 1e6:,.1f} MFLOPs "
            f"per token forward and backward at {size.sequence_length} tokens"
        )


@main.command("plan")
@click.argument("config", type=PLACE)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--gpus-per-node", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--device", default="h100", show_default=True, help="A name or file, configs/device.")
@click.option("--mfu", type=Number(0, 1, min_open=True), default=0.3, show_default=True)
@click.option("--price", type=Number(0), help="Of an hour of one GPU.")
@click.option("--node-mtbf-hours", type=POSITIVE, default=6300.0, show_default=True)
@click.option("--restart-seconds", type=Number(0, 1e9), default=600.0, show_default=True)
@click.option("--store-gbs", type=POSITIVE, default=2.0, show_default=True, help="Storage, GB/s.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def make_plan(
    config: str, overrides: tuple[str, ...], device: str, as_json: bool, **machine: Any
) -> None:
    """Say what the job CONFIG needs and takes on a cluster: memory, time, cost, failures."""
    import configs
    from cluster.planning import JobFacts, LearnerFacts, Machine, describe, make_plan
    from configs.devices import DeviceConfig
    from trainer.footprint.demands import demands

    on = Machine(configs.load(device, DeviceConfig, "device"), **machine)
    job = load_job(config, overrides)
    _warn_of_unreached(job)
    facts, learners = demands(job)
    plan = make_plan(JobFacts(**facts, learners=tuple(LearnerFacts(**one) for one in learners)), on)
    click.echo(plan.to_json() if as_json else describe(plan))


@main.command("import")
@click.argument("folder", type=PLACE)
@click.option("--out", type=PLACE, required=True)
def import_model(folder: str, out: str) -> None:
    """Turn the Hugging Face checkpoint in FOLDER into a teacher or student."""
    from model import describe, import_folder

    size = describe(import_folder(folder, out).config)
    click.echo(f"{size.parameters:,} parameters are in {out}; name {out}/model.yaml in a job")


@main.command()
@click.argument("run", type=PLACE)
def sync(run: str) -> None:
    """Make Weights & Biases agree with RUN's metrics.jsonl; offline without a key."""
    from trainer.record.syncing import sync as sync_run
    from trainer.run_folder.folder import RunFolder

    click.echo(sync_run(RunFolder.existing(run)))


@main.command()
@click.argument("run", type=PLACE)
@click.option("--learner", help="Only this one: teacher, or a student's name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evaluate(run: str, learner: str | None, as_json: bool) -> None:
    """Score the learners of RUN on held-out text."""
    from configs.strict_json import strict_json
    from trainer.evaluation.final_scores import evaluate_run
    from trainer.evaluation.finished import SavedLearners
    from trainer.report import student_table
    from trainer.run_folder.folder import RunFolder

    results = evaluate_run(SavedLearners(RunFolder.existing(run)), learner)
    click.echo(strict_json(results) if as_json else student_table(results))


@main.command()
@click.argument("run", type=PLACE)
@click.option("--learner", required=True, help="teacher, or a student's name.")
@click.option("--out", type=PLACE, required=True)
@click.option("--onnx", is_flag=True, help="Also write model.onnx.")
def export(run: str, learner: str, out: str, onnx: bool) -> None:
    """Write a learner of RUN in Hugging Face format."""
    from model import require_free

    folder = Path(out)
    require_free(folder)  # before what takes long to import
    from trainer.evaluation.export import export_learner
    from trainer.evaluation.finished import SavedLearners
    from trainer.run_folder.folder import RunFolder

    export_learner(SavedLearners(RunFolder.existing(run)), learner, folder)
    if onnx:
        from model import from_pretrained
        from model.onnx_export import export_onnx

        export_onnx(from_pretrained(folder), folder / "model.onnx")
    click.echo(f"{learner} of {run} is in {out}")


if __name__ == "__main__":
    main()
