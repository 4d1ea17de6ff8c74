"""The labelled examples that a job's objectives bring, in place of text."""

from __future__ import annotations

from collections.abc import Mapping

from data_pipeline import Batch, Corpus
from trainer.config import JobConfig


def examples_of(
    config: JobConfig, split: str, corpora: Mapping[str, Corpus]
) -> tuple[str, Batch] | None:
    """A term that brings examples, and its rows of "train" or "val"; None: the job reads text.

    The job's `corpora` say which tokenizer makes them token ids, and how long they are. Raises
    DataError when they cannot be read.
    """
    for learner in (config.teacher, *config.students.values()):
        for name, section in learner.objective.terms().items():
            if section.files:
                tokenizer = next(iter(corpora.values())).tokenizer_dir
                return name, section.examples(split, tokenizer, config.data.sequence_length)
    return None
