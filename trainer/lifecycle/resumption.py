"""Where a run resumes: a checkpoint, or its start."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.distributed as dist

import configs
from data_pipeline import Corpus, contents
from trainer.checkpoint import Attempt, Checkpoint, newest_intact
from trainer.config import JobConfig
from trainer.learners.state import JobState
from trainer.lifecycle import unreached
from trainer.lifecycle.first_stages import require_no_first_stage_again
from trainer.lifecycle.start import accept, config_of
from trainer.run_folder.folder import RunFolder
from trainer.tracking import tracking
from trainer.watch.ranks import on_rank_0
from trainer.watch.rollback import applied_state, checkpoint_to_resume

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumption:
    """Where a run resumes.

    checkpoint: the checkpoint that it resumes from; None: it starts from step 0.
    newest: the newest intact checkpoint, which a rollback skips.
    """

    config: JobConfig
    checkpoint: Checkpoint | None
    newest: Checkpoint | None

    @classmethod
    def find(cls, config: JobConfig) -> Resumption:
        """Verify the run's checkpoints until one is intact, and follow ``rollback``. Collective.

        Raises TrainingError or CheckpointError where the run cannot roll back as the config says,
        or a learner would go back into a first stage.
        """
        folder = RunFolder.of(config).checkpoints
        newest = newest_intact(folder, _log.warning, dist.group.WORLD)
        found = cls(config, checkpoint_to_resume(newest, config.rollback, dist.group.WORLD), newest)
        on_rank_0(found._require_no_first_stage_again)
        return found

    def _require_no_first_stage_again(self) -> None:
        """Judge by the checkpoint that counts: learners are further on in one that is skipped."""
        if self.checkpoint is not None:
            state = self.checkpoint.trainer_state
            before = config_of(RunFolder.of(self.config), state, self.config)
            require_no_first_stage_again(before, self.config, state)

    @property
    def learners(self) -> set[str]:
        """The full names of the learners in the checkpoint."""
        return set(self.checkpoint.learners) if self.checkpoint else set()

    def state(self, corpora: Mapping[str, Corpus]) -> JobState:
        """The job's state at the checkpoint, for a job that now reads these `corpora`."""
        if self.checkpoint is None:
            state = JobState(wandb_id=tracking.first_id(RunFolder.of(self.config).path))
        else:
            state = JobState.from_json(self.checkpoint.trainer_state)
        # A student that was removed, and comes back one day, starts anew.
        state.held_out = {n: one for n, one in state.held_out.items() if n in self.config.learners}
        state.config = configs.dump(self.config)
        state.corpora = contents(self.config.data, corpora)
        state.rolled_back = applied_state(self.config.rollback)
        return state

    def accept(self, attempt: Attempt) -> None:
        """Record where and with which config the run resumes, once all checks have passed.

        On rank 0 only.
        """
        if self.checkpoint is not None and self.checkpoint is not self.newest:
            attempt.disown_after(self.checkpoint.step)
        accept(self.config)

    def lines(self) -> Iterator[str]:
        """Lines for the user: where the run resumes, who is dropped, what is never reached."""
        config = self.config
        if self.checkpoint is not None:
            yield f"resuming from step {self.checkpoint.step:,}"
        if self.checkpoint is not self.newest:
            yield f"the checkpoints after it no longer count: {config.rollback[-1]}"
        for name in sorted(self.learners - config.learners.keys()):
            yield f"{name} is dropped: it is not in the config"
        if late := unreached.warning(config):
            yield late
        if not config.students:
            what = "fine-tuning" if config.data.has_examples else "pre-training"
            yield f"no students: plain {what} of the teacher"
