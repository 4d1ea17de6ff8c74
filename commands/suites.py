"""Suites: models fine-tuned and scored on several tasks, for `tandem evaluate --suite`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

import configs
from commands.job_configs import changes_since_run, load_job, prepare
from commands.training import final_results, run_ranks
from configs.interpolation import expanded
from configs.runs import STOPPED

if TYPE_CHECKING:
    from configs.suites import SuiteConfig, SuiteTaskConfig
    from trainer.config import JobConfig
    from trainer.suites.results import ModelResults, TaskScore

UNTRAINED = "untrained"
# Keys of jobs that each run has a value of its own for, and what to do instead of setting them.
OWN_KEYS = {
    "name": "leave it out, runs are named after task, model and seed",
    "output_dir": "use --out",
    "seed": "use seeds, or --seeds",
    "teacher.init.pretrained": "name the folders of the models",
}

# In the folder of a suite; the first is written before anything else, and shows whose folder it is.
MODELS = "models.json"  # a checksum of each model's folder
RESULTS, REPORT, RUNS = "suite.json", "report.html", "runs"


@dataclass(frozen=True)
class _Model:
    """A folder, and whether its own weights are read or random ones drawn for each seed."""

    folder: Path
    untrained: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """What a job says to begin with it."""
        own = configs.assignment("teacher.init.pretrained", self.folder)
        return (own, "teacher.init.random=true") if self.untrained else (own,)


@dataclass(frozen=True)
class _Run:
    """A model fine-tuned on a task with a seed: the task's job and the words that change it."""

    task: str
    model: str
    seed: int
    config: str
    changes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.task}-{self.model}-seed{self.seed}"

    @property
    def words(self) -> tuple[str, ...]:
        return (*self.changes, configs.assignment("name", self.name))


@dataclass(frozen=True)
class _Comparison:
    """A suite, and the runs that it makes of the models; `words` are those of every job."""

    suite: SuiteConfig
    models: Mapping[str, _Model]
    jobs: Mapping[_Run, JobConfig]
    words: Sequence[str]


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
    from trainer.suites.comparison import comparison_table, write_comparison
    from trainer.suites.results import to_json

    with _stopping():
        plan = prepare_suite(name, folders, out, overrides, seeds, untrained)
        evaluations = {
            run: _evaluation_of(run, job, out, nproc, as_json) for run, job in plan.jobs.items()
        }
        results = _results(plan.suite, plan.models, evaluations, plan.words)
    text = json.dumps(to_json(results), indent=2)
    (out / RESULTS).write_text(f"{text}\n")
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


def prepare_suite(
    name: str,
    folders: Sequence[str],
    out: Path,
    overrides: Sequence[str],
    seeds: Sequence[int],
    untrained: bool,
) -> _Comparison:
    """Load and check what `compare` takes, and encode the examples below `out`.

    Raises ConfigError, ModelError and DataError, also where two runs would have one name, and where
    `out` has a run of another job by the same name, or of a model that has been overwritten since.
    """
    from configs.suites import SuiteConfig

    suite = configs.load(name, SuiteConfig, "suite")
    _refuse_own_keys(suite, overrides)
    models = _models(folders, untrained)
    shared = tuple(_assignments(suite.job))

    def words(task: SuiteTaskConfig, model: _Model, seed: int) -> tuple[str, ...]:
        own = (*model.words, configs.assignment("output_dir", out / RUNS), f"seed={seed}")
        return (*own, *shared, *_assignments(task.job), *overrides)  # the last one wins

    runs = [
        _Run(task, model, seed, one.task or task, words(one, one_model, seed))
        for task, one in suite.tasks.items()
        for model, one_model in models.items()
        for seed in seeds or suite.seeds
    ]
    _require_own_names(runs)
    known = _known_digests(out)  # before examples are encoded, below `out`
    jobs = {run: prepare(load_job(run.config, run.words)) for run in runs}  # all, to show errors
    for job in jobs.values():
        _require_same(job)
    _require_unchanged(models, known, out)
    _require_pairs(suite, models, (*shared, *overrides))
    return _Comparison(suite, models, jobs, (*shared, *overrides))


def _finished_others(out: Path, runs: Sequence[_Run]) -> int:
    """How many runs of earlier comparisons in `out` are not in this one."""
    named = {run.name for run in runs}
    return sum(path.parent.name not in named for path in out.glob(f"{RUNS}/*/evaluation.json"))


def _refuse_own_keys(suite: SuiteConfig, overrides: Sequence[str]) -> None:
    """Raise ConfigError for a key of a job that a suite sets itself, for each of its runs."""
    sections = {"": suite.job} | {f"tasks.{name}.": one.job for name, one in suite.tasks.items()}
    in_file = [
        f"{above}job.{word}" for above, job in sections.items() for word in _assignments(job)
    ]
    for word in (*in_file, *overrides):
        key = word.partition("=")[0]
        if instead := OWN_KEYS.get(key.rpartition("job.")[2]):
            raise configs.ConfigError(f"{key}: a suite sets this for each run; {instead}")


def _models(folders: Sequence[str], untrained: bool) -> dict[str, _Model]:
    """The models by a name for each: the folder's, with as many parents as make them differ."""
    from model import ModelError, read_config

    paths = [Path(folder).resolve() for folder in folders]
    for path in paths:
        read_config(path)
        if paths.count(path) > 1:
            raise ModelError(f"{path}: is named twice")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    models: dict[str, _Model] = {}
    for path in paths:
        name = "-".join(path.parts[-depth:])
        if other := models.get(name):
            raise ModelError(f"{path}: is called {name}, as {other.folder} is; rename one of them")
        models[name] = _Model(path)
    if untrained:
        if UNTRAINED in models:
            raise ModelError(f"{models[UNTRAINED].folder}: rename it, or leave out --untrained")
        models[UNTRAINED] = _Model(paths[0], untrained=True)
    return models


def _require_own_names(runs: Sequence[_Run]) -> None:
    """Raise ConfigError where two runs have one name: one model would get the other's score."""
    known: dict[str, _Run] = {}
    for run in runs:
        other = known.setdefault(run.name, run)
        if other is not run:
            raise configs.ConfigError(
                f"tasks.{run.task}: its run of model {run.model} is called {run.name}, as task "
                f"{other.task}'s of model {other.model} is; rename a task or the folder of a model"
            )


def _assignments(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The values of nested sections as ``key=value``."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _assignments(value, f"{above}{key}.")
        else:
            yield configs.assignment(f"{above}{key}", value)


def _require_same(job: JobConfig) -> None:
    """Raise ConfigError where the job's run was made by another, such as with another model."""
    if found := changes_since_run(job):
        run = Path(job.output_dir, job.name)
        raise configs.ConfigError(
            f"--out: {run} is of another job ({'; '.join(map(str, found[:3]))}); name another "
            "folder, or delete that run"
        )


def _require_unchanged(models: Mapping[str, _Model], known: Mapping[str, Any], out: Path) -> None:
    """Raise ConfigError where the folder of a model has changed since `out` has runs of it.

    Records their digests in `out`; `known` are those that it has.
    """
    from trainer.durable import atomic_write
    from trainer.job_data.digests import digest_of

    record = out / MODELS
    found = {str(one.folder): digest_of(one.folder) for one in models.values()}
    for folder, digest in found.items():
        if known.get(folder, digest) != digest:
            raise configs.ConfigError(
                f"--out: {out} has runs of {folder} as it was before; name another folder, or "
                "delete that one"
            )
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(record, json.dumps({**known, **found}, indent=2) + "\n")


def _known_digests(out: Path) -> dict[str, Any]:
    """What `out` says of the models that it has runs of; empty for a new folder.

    Raises DataError where `out` has files of a suite's names that no suite wrote, and ModelError
    where it is the folder of a model.
    """
    from configs.strict_json import parse_json
    from data_pipeline import DataError
    from data_pipeline.shards.writing import refuse_existing
    from model import require_free

    record = out / MODELS
    if not record.exists():
        refuse_existing([record, out / RESULTS, out / REPORT])
        require_free(out)
        return {}
    try:
        known = parse_json(record.read_bytes())
    except ValueError:
        known = None
    if not isinstance(known, dict):
        raise DataError(
            f"{record}: damaged, or not of a suite; name another --out, or move {out} away"
        )
    return known


def _evaluation_of(
    run: _Run, job: JobConfig, out: Path, nproc: int | None, as_json: bool
) -> dict[str, Any]:
    """The results of a run, which is trained to its end first, unless it has come to it."""
    from trainer.device import choose_device
    from trainer.run_folder.folder import RunFolder
    from trainer.run_folder.run_files import primary_of, read_evaluation

    folder = RunFolder.of(job)
    found = final_results(job)
    if found is None:
        choose_device(job.device)
        with _output_to(out / "logs" / f"{run.name}.log"):
            code = run_ranks(job, [run.config, *run.words], nproc, one_of_several=True)
        if code:
            click.echo(f"tandem: {_how_to_go_on(code, folder.path)}", err=True)
            sys.exit(code)
        found = read_evaluation(folder.evaluation)
        assert found is not None, "a run that has ended well has results"
    column = primary_of(found)
    score = found["learners"]["teacher"].get(column.name)
    shown = "undefined" if score is None else column.written(score)
    click.echo(f"{run.name}: {shown}", err=as_json)
    return found


def _how_to_go_on(code: int, run: Path) -> str:
    """What to do after a run that ended with this exit code."""
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
    models: Mapping[str, _Model],
    evaluations: Mapping[_Run, Mapping[str, Any]],
    words: Sequence[str],
) -> dict[str, ModelResults]:
    from trainer.suites.results import ModelResults, task_score

    pairs = _pair_scores(suite, models, words)
    results = {}
    for model, one in models.items():
        scores = {}
        for task in suite.tasks:
            found = {
                run.seed: evaluation
                for run, evaluation in evaluations.items()
                if (run.task, run.model) == (task, model)
            }
            scores[task] = task_score(found)
        parameters = _parameters(one.folder)
        results[model] = ModelResults(str(one.folder), parameters, scores | pairs[model])
    return results


def _pair_scores(
    suite: SuiteConfig, models: Mapping[str, _Model], words: Sequence[str]
) -> dict[str, dict[str, TaskScore]]:
    """The scores on minimal pairs, after all training: this process has threads afterwards.

    An untrained model has none: it guesses.
    """
    from trainer.device import own_device
    from trainer.evaluation.minimal_pairs import score_minimal_pairs
    from trainer.suites.results import pair_score

    device = own_device()
    scores: dict[str, dict[str, TaskScore]] = {model: {} for model in models}
    for model, name, path in _pairs_of(suite, models, words):
        found = score_minimal_pairs(models[model].folder, path, device)
        scores[model][name] = pair_score(found)
    return scores


def _require_pairs(suite: SuiteConfig, models: Mapping[str, _Model], words: Sequence[str]) -> None:
    """Raise DataError for pairs that cannot be read, ModelError for a model without words."""
    from trainer.evaluation.minimal_pairs import require_scorable

    for model, _, path in _pairs_of(suite, models, words):
        require_scorable(models[model].folder, path)


def _pairs_of(
    suite: SuiteConfig, models: Mapping[str, _Model], words: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """(model, name of pairs, their path) of all that are scored."""
    root = Path(_root(words))
    for model, one in models.items():
        for name, path in suite.minimal_pairs.items():
            if not one.untrained:
                yield model, name, str(root / path)


def _root(words: Sequence[str]) -> str:
    """The folder ``data.root`` that these words set, under whatever key; empty: none."""
    data = configs.assigned(words).get("data")
    return expanded(str(data.get("root") or "")) if isinstance(data, dict) else ""


def _parameters(folder: Path) -> int:
    from model import describe, read_config

    return describe(read_config(folder)).parameters
