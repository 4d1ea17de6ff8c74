"""The short way to write a task's job: `tandem finetune`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.ending import ignore_write_errors
from commands.job_configs import changes_since_run, load_job, prepare
from commands.options import MODEL, NPROC, PATH, numbers, refuse_set_twice
from commands.training import announce_if_finished, final_results, one_thread, run_ranks
from configs import ConfigError, assignment
from configs.runs import STOPPED

if TYPE_CHECKING:
    from trainer.config import JobConfig


@click.command()
@click.argument("task", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--model", type=PATH, required=True, help="A folder of weights and a tokenizer.")
@NPROC
@click.option("--seeds", callback=numbers, help="One run per seed, such as 1,2,3.")
def finetune(
    task: str, overrides: tuple[str, ...], model: str, nproc: int | None, seeds: list[int]
) -> None:
    """Fine-tune the model in a folder on TASK.

    TASK is a file, or a name of `tandem list tasks`. The run is named after the task and the
    model, unless you give name=NAME. With several seeds there is a run for each seed. The command
    then prints the best, the mean and the standard deviation of their scores.
    """
    ignore_write_errors()
    if not Path(model).is_dir():
        why = "no such folder; name the folder of a model: none is downloaded"
        raise click.UsageError(f"--model {model}: {why}")
    refuse_set_twice(overrides, {"--model": model, "--seeds": seeds})
    words = [assignment(MODEL, Path(model)), *overrides]
    if not any(word.startswith("name=") for word in overrides):
        words.append(assignment("name", f"{Path(task).stem}-{Path(model).resolve().name}"))
    with one_thread():
        if not seeds:
            sys.exit(_train(load_job(task, tuple(words), ["task"]), [task, *words], nproc))
        jobs = _train_seeds(task, words, seeds, nproc)
    click.echo(f"\n{_summary(jobs)}")


def _train_seeds(
    task: str, words: list[str], seeds: list[int], nproc: int | None
) -> dict[int, JobConfig]:
    """Train a run for each seed; the jobs by seed. Exits with the code of a run that stops."""
    name = load_job(task, tuple(words), ["task"]).name
    jobs = {}
    for seed in seeds:
        of_seed = (*words, f"seed={seed}", assignment("name", f"{name}-seed{seed}"))
        jobs[seed] = load_job(task, of_seed, ["task"])
        if code := _train(jobs[seed], [task, *of_seed], nproc, one_of_several=True):
            if code == STOPPED:
                click.echo("tandem: stopped; the same command trains the rest", err=True)
            sys.exit(code)
    return jobs


def _train(
    job: JobConfig, words: Sequence[str], nproc: int | None, one_of_several: bool = False
) -> int:
    """Train the run to its end, unless it is finished; the exit code.

    words: the name of the task's config, and the overrides.
    """
    from trainer.device import choose_device

    choose_device(job.device)
    job = prepare(job)
    _require_same(job)
    return 0 if announce_if_finished(job) else run_ranks(job, words, nproc, one_of_several)


def _require_same(job: JobConfig) -> None:
    """Raise ConfigError if the run of that name belongs to another job.

    It does if its model differs, or if it is finished and its settings differ. An unfinished run
    may resume with other settings, such as more epochs.
    """
    has_ended = final_results(job) is not None
    if differences := [
        change for change in changes_since_run(job) if has_ended or change.key == MODEL
    ]:
        raise ConfigError(
            f"name: {Path(job.output_dir, job.name)} belongs to another job "
            f"({'; '.join(map(str, differences[:3]))}); set name=NEW, or delete that run"
        )


def _summary(jobs: dict[int, JobConfig]) -> str:
    """The primary metric of each learner over the seeds, and where the best is."""
    from trainer.run_folder.folder import RunFolder
    from trainer.run_folder.run_files import primary_of, read_evaluation
    from trainer.suites import TaskScore

    folders = {seed: RunFolder.of(job) for seed, job in jobs.items()}
    by_seed: dict[int, dict[str, Any]] = {}
    for seed, folder in folders.items():
        results = read_evaluation(folder.evaluation)
        assert results is not None, "a run that has ended well has results"
        by_seed[seed] = results
    column = primary_of(next(iter(by_seed.values())))
    lines = [f"{column.name} over {len(jobs)} seeds"]
    for learner in next(iter(by_seed.values()))["learners"]:
        scores = {
            seed: results["learners"].get(learner, {}).get(column.name)
            for seed, results in by_seed.items()
        }
        scores = {seed: score for seed, score in scores.items() if score is not None}
        if not scores:
            continue
        best = (max if column.higher_is_better else min)(scores, key=lambda seed: scores[seed])
        export = by_seed[best]["learners"][learner].get("export", folders[best].path)
        over_seeds = TaskScore(column, scores)
        measured = {"mean": over_seeds.mean, "standard deviation": over_seeds.deviation}
        lines.append(
            f"{learner}: best {column.written(scores[best])} (seed {best}, {export})"
            + "".join(f", {n} {column.written(v)}" for n, v in measured.items() if v is not None)
        )
    return "\n".join(lines)
