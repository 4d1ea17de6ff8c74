"""Export of a trained learner in Hugging Face format."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline import MASKED, Vocabulary
from model import (
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
from trainer.job_data.examples import TaskOfJob, tasks_of
from trainer.learner_config import LearnerConfig
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder
from trainer.run_folder.run_files import read_evaluation
from trainer.task_facts import TaskFacts, write_facts

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

    Raises TrainingError when there is no such learner, ModelError when it cannot be written.
    """
    name = saved.resolve(learner)
    config, weights = saved.config(name).architecture, saved.weights(name)
    if head is not None:
        config, weights = with_head_alone(config, head, weights)
    title = f"{saved.job.name} {name.removeprefix('students/')}"
    results = results or read_evaluation(saved.folder.evaluation)
    training = None if saved.config(name).frozen else _training(saved, name, results)
    card = model_card(title, config, training)
    corpus = next(iter(saved.corpora.values()))
    ids = _special_ids(corpus.vocabulary)
    with written_whole(out):
        note = save_pretrained((config, weights), out, corpus.tokenizer_dir, card, ids)
        write_config(config, out, title)
        _write_task_facts(saved, name, config, results, out)
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
    """What `tandem predict` needs to know about the tasks of an exported model's heads, if any."""
    tasks = [one for one in tasks_of(saved.job) if one.task.has_head(config)]
    if not tasks:
        return
    scores = {kind: value for (_, kind), value in _scores(saved, learner, results).items()}
    view = saved.config(learner).view
    write_facts(out, {one.task.head: _task_facts(one, view, scores) for one in tasks})


def _task_facts(one: TaskOfJob, view: str, scores: Mapping[str, float]) -> TaskFacts:
    task, data = one.task, one.data
    fields = task.texts_of(view)
    settings = {"task": task.name, **dataclasses.asdict(task)}
    own = {kind: value for kind, value in scores.items() if kind.startswith(f"{task.head}_")}
    assert data.sequence_length is not None
    return TaskFacts(fields, dict(data.columns), data.sequence_length, settings, own, data.encoding)


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
    terms = saved.config(name).objective.terms()
    return Training(
        data=_data(saved),
        steps=counters.steps_taken(state.step),
        tokens=counters.tokens,
        learning_rate=saved.config(name).optimizer.learning_rate,
        seed=saved.job.seed,
        base=_base(saved.config(name)),
        objectives={term: _settings(section) for term, section in terms.items()},
        metrics={
            f"{corpus} {kind}": value
            for (corpus, kind), value in _scores(saved, name, results).items()
        },
        teacher=_teacher(saved.job) if saved.config(name).objective.needs_teacher() else "",
        license=saved.job.license,
        revision=saved.folder.revision(),
        predicts=MASKED in saved.trained_heads(name),
    )


def _data(saved: SavedLearners) -> str:
    """The corpora, or the training file of each task."""
    if not saved.job.data.has_examples:
        return ", ".join(saved.corpora)
    return ", ".join(f"{one.data.train} ({one.name})" for one in tasks_of(saved.job))


def _base(learner: LearnerConfig) -> str:
    """What the learner's first weights were."""
    init = learner.init
    if init.teacher_layers:
        return "layers of the teacher in this job"
    return "" if init.random else init.pretrained or ""


def _teacher(job: JobConfig) -> str:
    how = "finished" if job.teacher.frozen else "in training"
    if not job.teachers:
        return f"the teacher of the job {job.name}, {how}"
    others = ", ".join(job.teachers)
    return f"the teacher of the job {job.name}, {how}, and its finished teachers {others}"


def _settings(section: object) -> str:
    assert dataclasses.is_dataclass(section)
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _scores(
    saved: SavedLearners, name: str, results: Mapping[str, Any] | None
) -> dict[tuple[str, str], float]:
    """Held-out scores by corpus and kind: the final ones, if they are of this checkpoint."""
    step = saved.checkpoint_of(name).step
    facts = {} if results is None else results["learners"].get(name, {})
    if results is None or facts.get("step", results["step"]) != step or not facts:
        return _newest_scores(saved.folder, name, step)
    corpora = facts["corpora"]
    return {
        (corpus, kind): value
        for corpus, scores in corpora.items()
        for kind, value in scores.items()
        if value is not None
    }


def _newest_scores(folder: RunFolder, name: str, step: int) -> dict[tuple[str, str], float]:
    """The newest held-out scores after at most `step` steps, by corpus and kind."""
    found: dict[tuple[str, str], float] = {}
    for row in metrics.read(folder.metrics):
        if row["step"] > step:
            break
        for key, value in row.items():
            parts = metrics.split_held_out(key)
            if parts is not None and parts[1] == name:
                found[parts[0], parts[2]] = value
    return found
