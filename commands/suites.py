"""Suites: models fine-tuned and scored on several tasks, for `tandem evaluate --suite`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from commands.suite_runs import REPORT, RESULTS, RUNS, SuiteModel, SuiteRun, pairs_of, prepare_suite
from commands.training import final_results, one_thread, run_ranks
from configs.runs import STOPPED

if TYPE_CHECKING:
    from configs.suites import SuiteConfig
    from trainer.config import JobConfig
    from trainer.suites import ModelResults, TaskScore


def default_folder(name: str) -> str:
    """Where a comparison goes unless a user says so."""
    return f"runs/suites/{Path(name).stem}"


def models_and_overrides(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """The folders of models, and the keys of jobs, among the words of a command.

    Raises UsageError where there is no folder.
    """
    overrides = [name for name in names if "=" in name and not Path(name).is_dir()]
    folders = [name for name in names if name not in overrides]
    if not folders:
        raise click.UsageError("name a RUN; or name the folder of a model, or several for --suite")
    return folders, overrides


def compare(
    name: str,
    folders: Sequence[str],
    out: Path,
    overrides: Sequence[str],
    seeds: Sequence[int],
    untrained: bool,
    nproc: int | None = None,
    as_json: bool = False,
) -> None:
    """Fine-tune and score the models in `folders` on a suite, as far as that is not done yet.

    With `untrained`, the first of them with random weights too. Everything goes to `out`: the runs,
    ``suite.json`` and ``report.html``. With `as_json`, standard output is the content of
    ``suite.json`` alone, and the rest goes to standard error. SIGTERM and SIGUSR1 end the process
    with exit code 75. Raises as `prepare_suite` does.
    """
    from configs.durable import atomic_write
    from configs.strict_json import strict_json
    from trainer.suites import comparison_table, to_json, write_comparison

    with _stopping():
        with one_thread():
            plan = prepare_suite(name, folders, out, overrides, seeds, untrained)
            evaluations = {
                run: _evaluation_of(run, job, out, nproc, as_json) for run, job in plan.jobs.items()
            }
        results = _results(plan.suite, plan.models, evaluations, plan.words)
    text = strict_json(to_json(results))
    atomic_write(out / RESULTS, f"{text}\n")
    about = plan.suite.about
    write_comparison(out / REPORT, Path(name).stem, about, results)
    table = f"{about}\n\n{comparison_table(results)}\n\nReport: {out / REPORT}"
    click.echo(text if as_json else table)
    if others := _finished_others(out, [*plan.jobs]):
        click.echo(
            f"Left out: {others} finished runs in {out / RUNS} of other models, tasks or seeds, "
            "which this command does not name",
            err=as_json,
        )


@contextmanager
def _stopping() -> Iterator[None]:
    """End at SIGTERM and SIGUSR1 as a stopped run does: what is finished is not done again."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(STOPPED)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _finished_others(out: Path, runs: Sequence[SuiteRun]) -> int:
    """How many runs of earlier comparisons in `out` are not in this one."""
    named = {run.name for run in runs}
    return sum(path.parent.name not in named for path in out.glob(f"{RUNS}/*/evaluation.json"))


def _evaluation_of(
    run: SuiteRun, job: JobConfig, out: Path, nproc: int | None, as_json: bool
) -> dict[str, Any]:
    """The results of a run, which is trained to its end first, unless it has come to it."""
    from trainer.device import choose_device
    from trainer.run_folder.folder import RunFolder
    from trainer.run_folder.run_files import primary_of, read_evaluation

    folder = RunFolder.of(job)
    evaluation = final_results(job)
    if evaluation is None:
        choose_device(job.device)
        with _output_to(out / "logs" / f"{run.name}.log"):
            code = run_ranks(job, [run.config, *run.words], nproc, one_of_several=True)
        if code:
            click.echo(f"tandem: {_how_to_go_on(code, folder.path)}", err=True)
            sys.exit(code)
        evaluation = read_evaluation(folder.evaluation)
        assert evaluation is not None, "a run that has ended well has results"
    column = primary_of(evaluation)
    score = evaluation["learners"]["teacher"].get(column.name)
    shown = "undefined" if score is None else column.written(score)
    click.echo(f"{run.name}: {shown}", err=as_json)
    return evaluation


def _how_to_go_on(code: int, run: Path) -> str:
    """The advice after a run that ended with this exit code."""
    if code == STOPPED:
        return f"stopped at {run}; the same command resumes there"
    return (
        f"{run} failed; remove the cause and repeat the command, or, to train it with other keys, "
        "delete that folder first"
    )


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Standard output, that of the ranks too, goes to a file; errors are shown as ever."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    kept = os.dup(1)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _results(
    suite: SuiteConfig,
    models: Mapping[str, SuiteModel],
    evaluations: Mapping[SuiteRun, Mapping[str, Any]],
    words: Sequence[str],
) -> dict[str, ModelResults]:
    from trainer.suites import ModelResults, task_score

    pairs = _pair_scores(suite, models, words)
    results = {}
    for model, source in models.items():
        scores = {}
        for task in suite.tasks:
            by_seed = {
                run.seed: evaluation
                for run, evaluation in evaluations.items()
                if (run.task, run.model) == (task, model)
            }
            scores[task] = task_score(by_seed)
        parameters = _parameters(source.folder)
        results[model] = ModelResults(str(source.folder), parameters, scores | pairs[model])
    return results


def _pair_scores(
    suite: SuiteConfig, models: Mapping[str, SuiteModel], words: Sequence[str]
) -> dict[str, dict[str, TaskScore]]:
    """The scores on minimal pairs, after all training: this process has threads afterwards.

    An untrained model has none: it guesses.
    """
    from trainer.device import own_device
    from trainer.evaluation.minimal_pairs import score_minimal_pairs
    from trainer.suites import pair_score

    device = own_device()
    scores: dict[str, dict[str, TaskScore]] = {model: {} for model in models}
    for model, name, path in pairs_of(suite, models, words):
        counts = score_minimal_pairs(models[model].folder, path, device)
        scores[model][name] = pair_score(counts)
    return scores


def _parameters(folder: Path) -> int:
    from model import describe, read_config

    return describe(read_config(folder)).parameters
