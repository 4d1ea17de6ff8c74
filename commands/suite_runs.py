"""The runs of a suite: each model on each task with each seed, checked before the first begins."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import configs
from commands.job_configs import changes_since_run, load_job, prepare
from commands.options import assignments
from configs.interpolation import expanded

if TYPE_CHECKING:
    from configs.suites import SuiteConfig, SuiteTaskConfig
    from trainer.config import JobConfig

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
class SuiteModel:
    """A folder, and whether its own weights are read or random ones drawn for each seed."""

    folder: Path
    untrained: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The words of a job that begins with it."""
        weights = configs.assignment("teacher.init.pretrained", self.folder)
        return (weights, "teacher.init.random=true") if self.untrained else (weights,)


@dataclass(frozen=True)
class SuiteRun:
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
class Comparison:
    """A suite, and the runs that it makes of the models; `words` are those of every job."""

    suite: SuiteConfig
    models: Mapping[str, SuiteModel]
    jobs: Mapping[SuiteRun, JobConfig]
    words: Sequence[str]


def prepare_suite(
    name: str,
    folders: Sequence[str],
    out: Path,
    overrides: Sequence[str],
    seeds: Sequence[int],
    untrained: bool,
) -> Comparison:
    """Load and check what `compare` takes, and encode the examples below `out`.

    Raises ConfigError, ModelError and DataError, also where two runs would have one name, and where
    `out` has a run of another job by the same name, or of a model that has been overwritten since.
    """
    from configs.suites import SuiteConfig

    suite = configs.load(name, SuiteConfig, "suite")
    _refuse_own_keys(suite, overrides)
    models = _models(folders, untrained)
    shared = tuple(assignments(suite.job))

    def words(task: SuiteTaskConfig, model: SuiteModel, seed: int) -> tuple[str, ...]:
        of_run = (*model.words, configs.assignment("output_dir", out / RUNS), f"seed={seed}")
        return (*of_run, *shared, *assignments(task.job), *overrides)  # the last one wins

    runs = [
        SuiteRun(task, model, seed, settings.task or task, words(settings, made, seed))
        for task, settings in suite.tasks.items()
        for model, made in models.items()
        for seed in seeds or suite.seeds
    ]
    _require_own_names(runs)
    known = _known_digests(out)  # before examples are encoded, below `out`
    jobs = {run: prepare(_loaded(name, run)) for run in runs}  # all, to show errors
    for job in jobs.values():
        _require_same(job)
    _require_unchanged(models, known, out)
    _require_pairs(suite, models, (*shared, *overrides))
    return Comparison(suite, models, jobs, (*shared, *overrides))


def _loaded(suite: str, run: SuiteRun) -> JobConfig:
    """The job of a run. Raises ConfigError, which names the suite and the task in it."""
    try:
        return load_job(run.config, run.words)
    except configs.ConfigError as error:
        raise configs.ConfigError(f"{suite}: tasks.{run.task}: {error}") from error


def _refuse_own_keys(suite: SuiteConfig, overrides: Sequence[str]) -> None:
    """Raise ConfigError for a key of a job that a suite sets itself, for each of its runs."""
    sections = {"": suite.job} | {f"tasks.{name}.": task.job for name, task in suite.tasks.items()}
    in_file = [f"{above}job.{word}" for above, job in sections.items() for word in assignments(job)]
    for word in (*in_file, *assignments(configs.assigned(overrides))):
        key = word.partition("=")[0]
        if instead := OWN_KEYS.get(key.rpartition("job.")[2]):
            raise configs.ConfigError(f"{key}: a suite sets this for each run; {instead}")


def _models(folders: Sequence[str], untrained: bool) -> dict[str, SuiteModel]:
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
    models: dict[str, SuiteModel] = {}
    for path in paths:
        name = "-".join(path.parts[-depth:])
        if other := models.get(name):
            raise ModelError(f"{path}: is called {name}, as {other.folder} is; rename one of them")
        models[name] = SuiteModel(path)
    if untrained:
        if UNTRAINED in models:
            raise ModelError(f"{models[UNTRAINED].folder}: rename it, or leave out --untrained")
        models[UNTRAINED] = SuiteModel(paths[0], untrained=True)
    return models


def _require_own_names(runs: Sequence[SuiteRun]) -> None:
    """Raise ConfigError where two runs have one name: one model would get the other's score."""
    known: dict[str, SuiteRun] = {}
    for run in runs:
        other = known.setdefault(run.name, run)
        if other is not run:
            raise configs.ConfigError(
                f"tasks.{run.task}: its run of model {run.model} is called {run.name}, as task "
                f"{other.task}'s of model {other.model} is; rename a task or the folder of a model"
            )


def _require_same(job: JobConfig) -> None:
    """Raise ConfigError where the job's run was made by another, such as with another model."""
    if differences := changes_since_run(job):
        run = Path(job.output_dir, job.name)
        raise configs.ConfigError(
            f"{run}: belongs to another job ({'; '.join(map(str, differences[:3]))}); name another "
            "--out, or delete that run"
        )


def _require_unchanged(
    models: Mapping[str, SuiteModel], known: Mapping[str, Any], out: Path
) -> None:
    """Raise ConfigError where the folder of a model has changed since `out` has runs of it.

    Records their digests in `out`; `known` are those that it has.
    """
    from configs.durable import atomic_write
    from trainer.job_data.encoding import digest_of

    record = out / MODELS
    digests = {str(model.folder): digest_of(model.folder) for model in models.values()}
    for folder, digest in digests.items():
        if known.get(folder, digest) != digest:
            raise configs.ConfigError(
                f"{out}: has runs of {folder} as it was before; name another --out, or delete "
                "that folder"
            )
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(record, json.dumps({**known, **digests}, indent=2) + "\n")


def _known_digests(out: Path) -> dict[str, Any]:
    """The digests of the models that `out` has runs of; empty for a new folder.

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


def _require_pairs(
    suite: SuiteConfig, models: Mapping[str, SuiteModel], words: Sequence[str]
) -> None:
    """Raise DataError for pairs that cannot be read, ModelError for a model without words."""
    from trainer.evaluation.minimal_pairs import require_scorable

    for model, _, path in pairs_of(suite, models, words):
        require_scorable(models[model].folder, path)


def pairs_of(
    suite: SuiteConfig, models: Mapping[str, SuiteModel], words: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """(model, name of pairs, their path) of all that are scored."""
    root = Path(_root(words))
    for model, source in models.items():
        for name, path in suite.minimal_pairs.items():
            if not source.untrained:
                yield model, name, str(root / path)


def _root(words: Sequence[str]) -> str:
    """The folder ``data.root`` that these words set, under whatever key; empty: none."""
    data = configs.assigned(words).get("data")
    return expanded(str(data.get("root") or "")) if isinstance(data, dict) else ""
