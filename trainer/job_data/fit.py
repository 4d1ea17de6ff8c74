"""Checks that the corpora and folders of a job exist and fit its models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from data_pipeline import Corpus, open_corpora
from data_pipeline.tokenization.tokenizer import load as load_tokenizer
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.learner_config import LearnerConfig
from trainer.run_folder.folder import RunFolder


def require_inputs(config: JobConfig) -> None:
    """Raise the DataError or TrainingError that would end the job, if it can be known here.

    Corpora behind URLs are not checked, because only the nodes may be able to reach them. Folders
    of weights are not checked once the run has a checkpoint, because it no longer reads them.
    """
    corpora = open_corpora(config.data, urls=False)
    require_fit(config, corpora)
    if not any(RunFolder.of(config).checkpoints.glob("step-*")):
        require_same_tokenizers(config, corpora, set())


def require_fit(config: JobConfig, corpora: Mapping[str, Corpus]) -> None:
    """Raise unless every model knows the corpora's vocabulary and has room for their sequences."""
    longest = max(length for length, _ in config.data.lengths_and_packings())
    for key, learner in _learners(config):
        for corpus in corpora.values():
            corpus.require_vocabulary(learner.model.vocab_size)
        most = learner.model.longest_sequence
        if most is not None and most < longest:
            section = key.replace("/", ".")
            raise TrainingError(
                f"{section}.model.max_positions: too few for data.sequence_length {longest}"
            )


def require_same_tokenizers(
    config: JobConfig, corpora: Mapping[str, Corpus], restored: Set[str]
) -> None:
    """Raise unless every learner that starts from a folder has the corpora's token ids.

    The folders of `restored` learners, which come from a checkpoint, are not checked: they may be
    gone.
    """
    for key, learner in _learners(config):
        if learner.init.pretrained and key not in restored:
            if not Path(learner.init.pretrained).is_dir():
                section = key.replace("/", ".")
                raise TrainingError(
                    f"{section}.init.pretrained: {learner.init.pretrained}: no such folder"
                )
            fingerprint = load_tokenizer(Path(learner.init.pretrained))[1].fingerprint
            for corpus in corpora.values():
                corpus.require_vocabulary(learner.model.vocab_size, fingerprint)


def _learners(config: JobConfig) -> Iterator[tuple[str, LearnerConfig]]:
    """Each learner by its name in metrics and checkpoints."""
    yield "teacher", config.teacher
    yield from ((f"students/{name}", student) for name, student in config.students.items())
