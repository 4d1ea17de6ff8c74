"""The learners of a run's checkpoints, without engines: each one's newest, best or given one."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping
from functools import cached_property

from torch import Tensor

from configs.errors import OptionError
from configs.typed import shown
from data_pipeline import Corpus, open_corpora
from model import Model, build
from trainer.checkpoint.reader import Checkpoint, best_intact, intact, newest_intact
from trainer.checkpoint.snapshot import AVERAGE
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.evaluation.held_out import trained_heads
from trainer.learner_config import DISENTANGLED, LearnerConfig
from trainer.learner_names import TEACHER, is_teacher, plain_name, section_of, student_key
from trainer.learners.first_weights import model_state
from trainer.learners.module import WORD_EMBEDDING
from trainer.learners.state import JobState
from trainer.run_folder.folder import RunFolder
from trainer.watch.guard import batch_number

_log = logging.getLogger(__name__)


class SavedLearners:
    """Read access to the learners of a run, each as one of its checkpoints holds it.

    checkpoint: the newest intact one, which says what there is.
    """

    def __init__(
        self,
        folder: RunFolder,
        corpora: Mapping[str, Corpus] | None = None,
        which: str | int | None = None,
    ) -> None:
        """`corpora` are those of the run's job, if they are already open.

        `which` is the checkpoint of each learner: ``last``, ``best`` or one of this step. None: as
        ``evaluation.final`` says, but the last one of a learner that has no score.

        Raises OptionError for another word, TrainingError when there is no checkpoint yet.
        """
        if isinstance(which, str) and which not in ("best", "last"):
            raise OptionError(f"--step: {shown(which)} is neither best, last nor a step")
        checkpoint = newest_intact(folder.checkpoints, _log.warning)
        if checkpoint is None:
            raise TrainingError(f"{folder.path}: no checkpoint yet; run `tandem train` first")
        self.folder: RunFolder = folder
        self.checkpoint: Checkpoint = checkpoint
        self.job: JobConfig = folder.load_config()
        self._corpora, self._which = corpora, which
        self.are_averages = False  # whether weights are averaged ones
        self._checkpoints: dict[str, Checkpoint] = {}

    @cached_property
    def corpora(self) -> Mapping[str, Corpus]:
        """The corpora of the run's job. Raises DataError where one of them is missing."""
        return self._corpora or open_corpora(self.job.data)

    def averages(self) -> SavedLearners:
        """The learners of the same checkpoints, with their averaged weights."""
        averages = copy.copy(self)
        averages.are_averages = True
        return averages

    def beside(self, name: str) -> SavedLearners:
        """The learners as they were in the checkpoint of the learner with this full name."""
        checkpoint, others = self.checkpoint_of(name), copy.copy(self)
        others._checkpoints = dict.fromkeys(checkpoint.learners, checkpoint)
        return others

    def has_average(self, name: str) -> bool:
        """Whether the checkpoint of the learner with this full name has averaged weights."""
        is_wanted = self.job.learners[name].average is not None
        return is_wanted and self.checkpoint_of(name).has_state(name, AVERAGE)

    @property
    def names(self) -> list[str]:
        """The learners that the run's config still names, the teachers first."""
        learners = self.job.learners.keys() & set(self.checkpoint.learners)
        return sorted(learners, key=lambda name: (not is_teacher(name), name))

    def resolve(self, learner: str) -> str:
        """The full name of a learner given as such, or of a student given as `NAME`.

        Raises OptionError for another name.
        """
        for name in (learner, student_key(learner)):
            if name in self.names:
                return name
        choices = ", ".join(plain_name(name) for name in self.names)
        raise OptionError(
            f"--learner: {self.folder.path} has no {learner}; choose among: {choices}"
        )

    def checkpoint_of(self, name: str) -> Checkpoint:
        """The checkpoint that holds the learner with this full name as it is wanted.

        Raises CheckpointError where the wanted one is missing, TrainingError where no checkpoint
        has a score of the learner.
        """
        if name not in self._checkpoints:
            self._checkpoints[name] = self._find(name)
        return self._checkpoints[name]

    def _find(self, name: str) -> Checkpoint:
        which = self.job.evaluation.final if self._which is None else self._which
        if isinstance(which, int):
            return intact(self.folder.checkpoints, which)
        if which == "last" or self.job.learners[name].frozen:
            return self.checkpoint
        ranking = next(
            (candidate for candidate in self.job.rankings if candidate.learner == name), None
        )
        best = ranking and best_intact(self.folder.checkpoints, ranking, _log.warning)
        if best is None and self._which:
            raise TrainingError(
                f"{self.folder.checkpoints}: no checkpoint has a held-out score of {name}; "
                "take --step last"
            )
        return best or self.checkpoint

    def config(self, name: str) -> LearnerConfig:
        """The config of the learner with this full name, with the model that it had then."""
        config = self.job.learners[name]
        if name == TEACHER:
            config = config.with_layers(self.state_of(name).teacher_layers)
        if config.frozen or not any(phase.rope_theta for phase in self.job.data.phases):
            return config
        state = self.state_of(name)
        counters = state.learners.get(name)  # None: it is not in this checkpoint
        finished = counters and counters.finished_at
        last = batch_number((finished or state.step) - 1, self.job.rollback)
        model = config.model.with_rope_theta(self.job.data.rope_theta_at(last))
        return dataclasses.replace(config, model=model)

    @cached_property
    def state(self) -> JobState:
        """The job's state at the newest checkpoint."""
        return JobState.from_json(self.checkpoint.trainer_state)

    @property
    def are_done(self) -> bool:
        """Whether every learner that the job trains has finished by itself."""
        trained = [name for name, learner in self.job.learners.items() if not learner.frozen]
        states = [self.state.learners.get(name) for name in trained]
        return all(state is not None and state.finished_at is not None for state in states)

    def state_of(self, name: str) -> JobState:
        """The job's state at the checkpoint of the learner with this full name."""
        return JobState.from_json(self.checkpoint_of(name).trainer_state)

    def trained_heads(self, name: str) -> frozenset[str]:
        """The trained heads of the learner with this full name."""
        state = self.state_of(name)
        config = self.config(name).in_steps(self.job.steps)
        return trained_heads(config, state.learners[name], state.step)

    def weights(self, name: str) -> dict[str, Tensor]:
        """The model's float32 weights, without its objective's projections.

        Raises TrainingError where they are to be averaged ones, of which there are none.
        """
        checkpoint = self.checkpoint_of(name)
        if not self.are_averages:
            return self._whole(name, model_state(checkpoint.master_weights(name)))
        if not self.has_average(name):
            raise TrainingError(
                f"{checkpoint.path}: {name} has no averaged weights; set {section_of(name)}.average"
            )
        return model_state(checkpoint.master_weights(name, AVERAGE))

    def _whole(self, name: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights with the generator's word embedding added to one that shares it."""
        config = self.job.learners[name]
        if config.embedding_sharing == DISENTANGLED:
            assert config.generator_name is not None
            generator = self.checkpoint_of(name).master_weights(config.generator_name)
            table = model_state(generator)[WORD_EMBEDDING]
            weights[WORD_EMBEDDING] = weights[WORD_EMBEDDING] + table
        return weights

    def load(self, name: str) -> Model:
        """The model, in evaluation mode, on the CPU."""
        model = build(self.config(name).architecture, seed=0)
        model.load_state_dict(self.weights(name))
        return model.eval()
