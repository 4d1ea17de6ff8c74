"""A trained learner in Hugging Face format."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from data_pipeline import open_corpora
from model import Training, model_card, save_pretrained, write_config
from trainer.config import JobConfig
from trainer.control.run_folder import RunFolder
from trainer.evaluation.finished import SavedLearners
from trainer.learner import TEACHER
from trainer.record import metrics

_log = logging.getLogger(__name__)


def export_learner(saved: SavedLearners, learner: str, out: Path) -> None:
    """Write a learner of the newest checkpoint, its tokenizer and its model card to `out`.

    As from ``tandem import``, a job can name `out` as ``init.pretrained`` and its model.yaml as
    ``model``.

    Raises TrainingError when there is no such learner, ModelError when it cannot be written.
    """
    name = saved.resolve(learner)
    config = saved.config(name).model
    title = f"{saved.job.name} {name.removeprefix('students/')}"
    training = None if saved.config(name).frozen else _training(saved, name)
    card = model_card(title, config, training)
    tokenizer = next(iter(open_corpora(saved.job.data).values())).tokenizer_dir
    note = save_pretrained((config, saved.weights(name)), out, tokenizer, card)
    write_config(config, out, title)
    if note:
        _log.warning("%s: %s", name, note)


def _training(saved: SavedLearners, name: str) -> Training:
    """What the model card says of the learner's training."""
    state = saved.state
    counters = state.learners[name]
    terms = saved.config(name).objective.terms()
    return Training(
        data=", ".join(open_corpora(saved.job.data)),
        steps=counters.steps_taken(state.step),
        tokens=counters.tokens,
        objectives={term: _settings(section) for term, section in terms.items()},
        metrics=_newest_scores(saved.folder, name),
        teacher="" if name == TEACHER else _teacher(saved.job),
        licence=saved.job.licence,
        revision=saved.folder.revision(),
    )


def _teacher(job: JobConfig) -> str:
    return (
        f"the teacher of the job {job.name}, {'finished' if job.teacher.frozen else 'in training'}"
    )


def _settings(section: object) -> str:
    assert dataclasses.is_dataclass(section)
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _newest_scores(folder: RunFolder, name: str) -> dict[str, float]:
    """The last held-out scores, by corpus and kind."""
    found: dict[str, float] = {}
    for row in metrics.read(folder.metrics):
        for key, value in row.items():
            parts = metrics.split_held_out(key)
            if parts is not None and parts[1] == name:
                found[f"{parts[0]} {parts[2]}"] = value
    return found
