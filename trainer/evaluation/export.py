"""Export of a trained learner in Hugging Face format."""

import dataclasses
import json
import logging
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from configs.durable import atomic_write
from data_pipeline import MASKED, Vocabulary
from model import (
    VECTOR,
    ModelConfig,
    Training,
    model_card,
    save_pretrained,
    with_head_alone,
    write_config,
    written_whole,
)
from trainer.config import JobConfig
from trainer.evaluation.finished import SavedLearners
from trainer.job_data.encoding import TaskOfJob
from trainer.job_data.examples import tasks_of
from trainer.learner_config import LearnerConfig
from trainer.learner_names import plain_name
from trainer.objectives.task import STATISTICS
from trainer.objectives.term import TermConfig
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder
from trainer.run_folder.run_files import read_evaluation
from trainer.scoring.columns import OF_AVERAGE
from trainer.scoring.scores import columns_of
from trainer.task_facts import TaskFacts, chosen_head, write_facts

PAIR_OF_TEXTS = ("text_a", "text_b")
FILLED_IN = ("labels", "examples", *STATISTICS)  # keys of tasks that the job sets, or the head has
_MODULES = "sentence_transformers.models"
_log = logging.getLogger(__name__)


def export_learner(
    saved: SavedLearners,
    learner: str,
    out: Path,
    results: Mapping[str, Any] | None = None,
    head: str | None = None,
) -> str:
    """Write a learner, as `saved` has it, its tokenizer and its model card to `out`.

    The card shows the scores from the run's final `results` (by default those in its folder), or,
    of a checkpoint that these are not about, the newest held-out ones up to its step. As after
    ``tandem import``, a job can name `out` as ``init.pretrained`` and its model.yaml as ``model``.
    With a `head`, the encoder and this task head alone are written, in a form that `transformers`
    loads; None: every head. Returns why `transformers` cannot load it, or an empty string.

    Raises OptionError when there is no such learner or head, ModelError when it cannot be written.
    """
    name = saved.resolve(learner)
    config, weights = saved.config(name).architecture, saved.weights(name)
    if head is not None:
        chosen_head(saved.folder.path, [*config.task_heads], head)
        config, weights = with_head_alone(config, head, weights)
    title = f"{saved.job.name} {plain_name(name)}"
    if saved.are_averages:
        title += ", averaged"
    results = results or read_evaluation(saved.folder.evaluation)
    training = None if saved.config(name).frozen else _training(saved, name, results)
    card = partial(model_card, title, config, training)
    corpus = saved.job.read_by(saved.config(name), next(iter(saved.corpora.values())))
    ids = _special_ids(corpus.vocabulary)
    with written_whole(out):
        note = save_pretrained((config, weights), out, corpus.tokenizer_dir, card, ids)
        _write_task_facts(saved, name, config, results, out)
        if not note:
            _write_modules(saved, config, out)
        write_config(config, out, title)  # last: with it a run's export is complete
    if note:
        _log.warning("%s: %s", name, note)
    return note


def _write_task_facts(
    saved: SavedLearners,
    learner: str,
    config: ModelConfig,
    results: Mapping[str, Any] | None,
    out: Path,
) -> None:
    """Write the facts that `tandem predict` reads about the tasks of an exported model's heads."""
    tasks = [job_task for job_task in tasks_of(saved.job) if job_task.task.has_head(config)]
    if not tasks:
        return
    scores = {kind: value for (_, kind), value in _scores(saved, learner, results).items()}
    view = saved.config(learner).view
    write_facts(
        out, {job_task.task.head: _task_facts(job_task, view, scores) for job_task in tasks}
    )


def _write_modules(saved: SavedLearners, config: ModelConfig, out: Path) -> None:
    """Write the files of `sentence-transformers` for an encoder whose only head is a pooled state.

    Of other models it takes the mean of the last states, as ``tandem embed`` does.
    """
    heads = [head for head in config.task_heads.values() if head.kind == VECTOR]
    tasks = [job_task for job_task in tasks_of(saved.job) if job_task.task.has_head(config)]
    if not heads or not tasks:
        return
    (head,), task = heads, dataclasses.asdict(tasks[0].task)
    names = ["Transformer", "Pooling", *["Normalize"] * head.normalise]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{_MODULES}.{name}"}
        for number, (name, path) in enumerate(zip(names, paths, strict=False))
    ]
    pooling = {
        "word_embedding_dimension": config.hidden_size,
        "pooling_mode_cls_token": head.pooling == "first",
        "pooling_mode_mean_tokens": head.pooling == "mean",
    }
    prefix = task.get("prefix", "")
    prompts = {name: task.get(f"{name}_prefix", prefix) for name in ("query", "document")}
    settings = {
        "prompts": prompts,
        "default_prompt_name": "document" if prefix else None,
        "similarity_fn_name": "cosine" if head.normalise else "dot",
    }
    length = {"max_seq_length": tasks[0].data.sequence_length, "do_lower_case": False}
    for folder in paths[1 : len(names)]:
        (out / folder).mkdir(exist_ok=True)
    for file, tree in {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "config_sentence_transformers.json": settings,
        "sentence_bert_config.json": length,
    }.items():
        atomic_write(out / file, json.dumps(tree, indent=2) + "\n")


def _task_facts(job_task: TaskOfJob, view: str, scores: Mapping[str, float]) -> TaskFacts:
    task, data = job_task.task, job_task.data
    fields = task.texts_of(view)
    settings = {"task": task.name, **dataclasses.asdict(task)}
    settings.pop("examples", None)  # a folder of this machine
    head_scores = {
        kind: value for kind, value in scores.items() if kind.startswith(f"{task.head}_")
    }
    assert data.sequence_length is not None
    return TaskFacts(
        fields, dict(data.columns), data.sequence_length, settings, head_scores, data.encoding
    )


def _special_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Special token ids by the keys of `transformers`; [CLS] begins and [SEP] ends a sequence."""
    first, last = vocabulary.cls, vocabulary.sep
    return {
        "bos_token_id": first,
        "eos_token_id": last,
        "cls_token_id": first,
        "sep_token_id": last,
        "mask_token_id": vocabulary.mask,
    }


def _training(saved: SavedLearners, name: str, results: Mapping[str, Any] | None) -> Training:
    """The facts about the learner's training for the model card."""
    state = saved.state_of(name)
    counters = state.learners[name]
    terms, view = saved.config(name).objective.terms(), saved.config(name).view
    tasks = tasks_of(saved.job) if saved.job.data.has_examples else []
    return Training(
        data=_data(saved),
        steps=counters.steps_taken(state.step),
        tokens=counters.tokens,
        learning_rate=saved.config(name).optimizer.learning_rate,
        seed=saved.job.seed,
        base=_base(saved.config(name)),
        objectives={term: _settings(section) for term, section in terms.items()},
        scored=_scored(saved),
        metrics=_metrics(saved, name, results),
        teacher=_teacher(saved.job) if saved.config(name).objective.teacher_terms() else "",
        license=saved.job.license,
        revision=saved.folder.revision(),
        predicts=MASKED in saved.trained_heads(name),
        texts=2 if any(job_task.task.texts_of(view) == PAIR_OF_TEXTS for job_task in tasks) else 1,
    )


def _data(saved: SavedLearners) -> str:
    """The corpora, or the training file of each task, by name."""
    if not saved.job.data.has_examples:
        return ", ".join(saved.corpora)
    tasks = tasks_of(saved.job)
    names = [_file_name(job_task, job_task.data.train) for job_task in tasks]
    if len(tasks) == 1:
        return names[0]
    return ", ".join(
        f"{name} ({job_task.name})" for name, job_task in zip(names, tasks, strict=True)
    )


def _file_name(task: TaskOfJob, path: str | None) -> str:
    """A file's name with that of its folder, since many are called train.tsv."""
    return "/".join((Path(task.data.root) / (path or "")).parts[-2:])


def _scored(saved: SavedLearners) -> str:
    """The data that scores are about, as a heading."""
    if not saved.job.data.has_examples:
        return f"Held-out text of {', '.join(saved.corpora)}"
    first, *others = tasks_of(saved.job)
    if others:
        return "Validation files"
    path = first.data.validation
    return f"Validation file {_file_name(first, path)}" if path else "Validation examples"


def _metrics(
    saved: SavedLearners, name: str, results: Mapping[str, Any] | None
) -> dict[str, float]:
    """The scores by the headings of tables, with the corpus or task where there are several."""
    columns = columns_of(saved.job.metrics_of(saved.config(name)))
    scores = _scores(saved, name, results)
    several = len({corpus for corpus, _ in scores}) > 1 and not saved.job.data.has_examples
    return {
        f"{corpus} {columns[kind].heading}" if several else columns[kind].heading: value
        for (corpus, kind), value in scores.items()
        if kind in columns
    }


def _base(learner: LearnerConfig) -> str:
    """The origin of the learner's first weights: a model by its folder, or by run and name."""
    init = learner.init
    if init.teacher_layers:
        return "layers of the teacher in this job"
    if init.random or not init.pretrained:
        return ""
    *_, run, folder, name = ("", "", *Path(init.pretrained).parts)
    return f"{run} {name}" if folder == "exports" else name


def _teacher(job: JobConfig) -> str:
    how = "finished" if job.teacher.frozen else "in training"
    if not job.teachers:
        return f"the teacher of the job {job.name}, {how}"
    others = ", ".join(job.teachers)
    return f"the teacher of the job {job.name}, {how}, and its finished teachers {others}"


def _settings(section: TermConfig) -> str:
    """The weight of a term, and its other settings that differ from the defaults."""
    changed = section.changed(*(field.name for field in dataclasses.fields(section)))
    shown = dict.fromkeys(["weight", *(name for name in changed if name not in FILLED_IN)])
    values = dataclasses.asdict(section)
    return ", ".join(f"{name} {_as_yaml(values[name])}" for name in shown)


def _as_yaml(value: Any) -> str:
    """A value as a job's YAML has it, on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=sys.maxsize)
    return text.partition("\n")[0]


def _scores(
    saved: SavedLearners, name: str, results: Mapping[str, Any] | None
) -> dict[tuple[str, str], float]:
    """Held-out scores by corpus and kind: the final ones, if they are of this checkpoint."""
    step = saved.checkpoint_of(name).step
    facts = {} if results is None else results["learners"].get(name, {})
    if results is None or facts.get("step", results["step"]) != step or not facts:
        held_out = _newest_scores(saved.folder, name, step)
    else:
        held_out = {
            (corpus, kind): value
            for corpus, scores in facts["corpora"].items()
            for kind, value in scores.items()
            if value is not None
        }
    return {
        (corpus, kind.removeprefix(OF_AVERAGE)): value
        for (corpus, kind), value in held_out.items()
        if kind.startswith(OF_AVERAGE) is saved.are_averages
    }


def _newest_scores(folder: RunFolder, name: str, step: int) -> dict[tuple[str, str], float]:
    """The newest held-out scores after at most `step` steps, by corpus and kind."""
    newest: dict[tuple[str, str], float] = {}
    for row in metrics.read(folder.metrics):
        if row["step"] > step:
            break
        for key, value in row.items():
            parts = metrics.split_held_out(key)
            if parts is not None and parts[1] == name:
                newest[parts[0], parts[2]] = value
    return newest
