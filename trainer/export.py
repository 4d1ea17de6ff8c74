"""A trained learner in Hugging Face format."""

from __future__ import annotations

import logging
from pathlib import Path

from data_pipeline import open_corpora
from model import save_pretrained
from trainer.finished import SavedLearners
from trainer.run_folder import RunFolder

_log = logging.getLogger(__name__)


def export_learner(folder: RunFolder, learner: str, out: Path) -> None:
    """Write a learner of the newest checkpoint, with the tokenizer of its corpus, to `out`.

    Raises TrainingError when there is no such learner, ModelError when it cannot be written.
    """
    saved = SavedLearners(folder)
    name = saved.resolve(learner)
    tokenizer = next(iter(open_corpora(saved.job.data).values())).tokenizer_dir
    note = save_pretrained((saved.config(name).model, saved.weights(name)), out, tokenizer)
    if note:
        _log.warning("%s: %s", name, note)
