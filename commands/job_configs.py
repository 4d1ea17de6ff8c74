"""Loading the config that a command names: a job's, or one section of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click

if TYPE_CHECKING:
    from data_pipeline import BatchSizes, DataConfig, View
    from trainer.config import JobConfig
    from trainer.lifecycle.continuity import Change


def load_job(
    config: str, overrides: tuple[str, ...], kinds: Sequence[str] = ("job", "task")
) -> JobConfig:
    """Load the config of a job, or of a task, by name or file; reads no data and writes nothing.

    A name is that of a shipped file of one of these `kinds`. See `prepare`.
    """
    import configs
    from trainer.config import JobConfig

    return configs.load(config, JobConfig, _kind(config, kinds), overrides)


def prepare(job: JobConfig) -> JobConfig:
    """The job, completed from its data: the examples of tasks are encoded, unless they are.

    Raises DataError and TrainingError for examples that cannot be read.
    """
    from trainer.job_data.examples import with_examples

    return with_examples(job)


def task_job(config: str, overrides: tuple[str, ...]) -> JobConfig:
    """The config of a job about one task, whose examples are not encoded yet.

    Raises UsageError for a job that reads text, or the examples of several tasks.
    """
    job = load_job(config, overrides, ["task"])
    if not job.data.train:
        raise click.UsageError(f"{config}: names no examples of one task in data.train")
    return job


def changes_since_run(job: JobConfig) -> list[Change]:
    """The job's differences from the run by its name; none where there is no such run.

    The run's folder may have been moved, and its corpora too.
    """
    from data_pipeline import DataError, contents
    from trainer.lifecycle.continuity import changes
    from trainer.run_folder.folder import RunFolder

    folder = RunFolder.of(job)
    if not folder.config.exists():
        return []
    before = folder.load_config()
    differences = [change for change in changes(before, job) if not _is_place(change)]
    if not any(change.key.endswith(".path") for change in differences):
        return differences
    try:
        then, now = contents(before.data), contents(job.data)
    except DataError:  # what the run has read is gone
        return differences
    return [
        change
        for change in differences
        if change.key not in then or then[change.key] != now.get(change.key)
    ]


def _is_place(change: Change) -> bool:
    """Whether a change is only one of place: of the runs' folder, or of copies of plugins."""
    if change.key != "plugins":
        return change.key == "output_dir"
    lists = (cast("list[str]", paths) for paths in (change.old, change.new))
    old, new = ([Path(path).name for path in paths] for paths in lists)
    return old == new


def _kind(config: str, kinds: Sequence[str]) -> str:
    """Which of these kinds of shipped files has this name, or the nearest; a path is a job's."""
    import configs

    if Path(config).name != config or Path(config).suffix:
        return "job"
    files = {path.stem: kind for kind in kinds for path in (configs.SHIPPED / kind).glob("*.yaml")}
    near = get_close_matches(config, files, n=1, cutoff=0.5)
    return files[near[0]] if near else kinds[0]


class DataSection(NamedTuple):
    """The data of a job, its seed and its global batch sizes.

    views: the forms in which a learner reads the examples of each corpus, by its name; empty where
    it reads them whole. labels: the names of the labels of each head of a task, by its name.
    """

    data: DataConfig
    seed: int
    sizes: BatchSizes
    views: Mapping[str, View]
    labels: Mapping[str, Sequence[str]]


def data_section(
    config: str, overrides: tuple[str, ...], learner: str | None, split: str = "train"
) -> DataSection:
    """The data that a learner of a job reads; a data config gets a job's defaults.

    A name is that of a job where there is one, as for `tandem train`. Raises UsageError for a
    learner that the job does not have, and without one where learners read different views.
    """
    import configs
    from data_pipeline import BatchSizes, DataConfig

    if not configs.is_shipped(config, "job") and not _is_job(config, "data"):
        if learner is not None:
            raise click.UsageError(f"--learner: {config} has no learners; remove it")
        data = configs.load(config, DataConfig, "data", overrides)
        return DataSection(data, 0, BatchSizes.constant(64), {}, {})
    from trainer.job_data.counting import global_batches

    job = prepare(load_job(config, overrides))
    heads = [learner_config.architecture.task_heads for learner_config in job.learners.values()]
    labels = {name: head.labels for several in heads for name, head in several.items()}
    views = _views(job, learner, split)
    return DataSection(job.data, job.seed, global_batches(job), views, labels)


def _views(job: JobConfig, learner: str | None, split: str) -> dict[str, View]:
    """The view of each corpus that a learner reads; empty where it reads whole examples."""
    from data_pipeline import DEFAULT_VIEW, open_corpora
    from trainer.evaluation.held_out import SEED
    from trainer.job_data.examples import views_of
    from trainer.learner_names import plain_name

    views = {plain_name(name): learner_config.form for name, learner_config in job.learners.items()}
    if learner is None and len({*views.values()}) > 1:
        choices = ", ".join(f"{name} ({view})" for name, view in views.items())
        raise click.UsageError(
            f"--learner: must be given, because learners read different views: {choices}"
        )
    if learner is not None and learner not in views:
        raise click.UsageError(f"--learner: {learner}: must be one of {', '.join(views)}")
    view = views[learner] if learner is not None else next(iter(views.values()))
    if view == DEFAULT_VIEW:
        return {}
    seed = job.seed if split == "train" else SEED  # held-out examples keep their masks
    return {corpus: views_of(job, corpus, seed)[view] for corpus in open_corpora(job.data)}


def models(config: str) -> list[tuple[str, Any, int | None, float]]:
    """(name, config, sequence length, masked fraction) of each model in a model or job file."""
    import configs
    from model import ModelConfig
    from model.accounting import MASKED_FRACTION
    from trainer.learner_names import plain_name

    if not _is_job(config, "model"):
        name, schema = configs.find(config, "model").stem, cast(Any, ModelConfig)
        return [(name, configs.load(config, schema, "model"), None, MASKED_FRACTION)]
    job = prepare(load_job(config, ()))
    most = job.data.longest, job.data.highest_masking_rate
    return [
        (plain_name(name), learner.architecture, *most) for name, learner in job.learners.items()
    ]


def warn_about(job: JobConfig) -> None:
    """Warn of keys that name a step after the job's last one, or a folder that is not here."""
    from trainer.learner_names import section_of
    from trainer.lifecycle.continuity import unreached_warning

    if late := unreached_warning(job):
        click.echo(f"warning: {late}", err=True)
    for name, learner in job.learners.items():
        folder = learner.init.pretrained
        if folder and not Path(folder).is_dir():
            section = section_of(name)
            click.echo(
                f"warning: {section}.init.pretrained: {folder}: no such folder on this machine; "
                f"the model is that of {section}.model, or BERT-base where that is not set",
                err=True,
            )


def _is_job(config: str, kind: str) -> bool:
    """Whether a name is rather a job's: `kind` has none such or nearer, or its file is a job's."""
    import dataclasses

    import configs
    from trainer.config import JobConfig

    try:
        path = configs.find(config, kind)
    except configs.ConfigError:
        return _kind(config, [kind, "job", "task"]) != kind
    keys = {field.name for field in dataclasses.fields(JobConfig)}
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        tree = configs.plain(text, str(path))
        if tree.keys() == {"base"}:
            tree = configs.load_tree(config, JobConfig, "job")
    except configs.ConfigError:  # refused as what it seems to be
        return not keys.isdisjoint(re.findall(r"^(\w+):", text, re.MULTILINE))
    return not keys.isdisjoint(tree)
