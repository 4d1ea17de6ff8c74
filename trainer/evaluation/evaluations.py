"""A job's held-out evaluations: the learners' scores during training, and the newest of them."""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline import MASKED
from trainer.batches import MicroBatch
from trainer.checkpoint.reader import Checkpoint
from trainer.config import JobConfig
from trainer.evaluation.held_out import SEED, Scorer, Scores, ValidationSet, trained_heads
from trainer.evaluation.setbacks import Setback, setbacks
from trainer.learner_names import TEACHER
from trainer.learners.learner import Learner
from trainer.learners.learners import Learners
from trainer.learners.module import compared_heads
from trainer.learners.state import JobState
from trainer.replaced_tokens import with_view
from trainer.scoring.columns import OF_NEXT_TOKENS
from trainer.watch.guard import batch_number


class Evaluations:
    """Scores every learner on the job's held-out text.

    newest: learner -> the step and the loss (nats) of its newest evaluation.
    unigram: the scores of the unigram baseline, by column.
    """

    def __init__(
        self,
        config: JobConfig,
        validation: ValidationSet,
        device: torch.device,
        checkpoint: Checkpoint | None,
    ) -> None:
        """`checkpoint` is the one that the job resumes from, which it may save once more."""
        self.newest: dict[str, tuple[int, float]] = {}
        self.unigram = validation.unigram()
        self._config, self._validation, self._device = config, validation, device
        self._scores: tuple[int, dict[str, float]] = (0, {})  # see `scores_at`
        if checkpoint is not None:
            self._scores = checkpoint.step, checkpoint.scores_by(config.rankings)
            for name, learner in checkpoint.health.items():
                if learner.evaluated_at is not None:
                    loss = math.nan if learner.held_out is None else learner.held_out
                    self.newest[name] = learner.evaluated_at, loss

    def run(self, learners: Learners, state: JobState) -> dict[str, Scores]:
        """Every learner's scores after `state.step` steps; `state` gets the teacher's. Collective.

        The score of an untrained head is None. Those of averaged weights stand beside the others.
        """
        by_learner: dict[str, Scores] = {}
        for name, learner in learners.scored_at(state.step).items():
            # A finished teacher's own config has no objective any more.
            teacher = self._config.teacher.in_steps(self._config.steps)
            config = teacher if name == TEACHER else learner.config
            trained = trained_heads(config, learner.counters, state.step)
            scorer = _scorer(learner, learners.by_name)
            by_learner[name] = self._of_weights(learner, scorer, trained, state.step)
            if (loss := by_learner[name].overall.get("loss")) is not None:
                self.newest[name] = (state.step, loss)
                own_steps = learner.counters.steps_made(state.step)
                state.held_out.setdefault(name, []).append([own_steps, loss])
            if learner.has_average:
                with learner.averaged():
                    averages = self._of_weights(learner, scorer, trained, state.step)
                    by_learner[name] = by_learner[name].beside(averages)
        known = {
            name: score for name, score in by_learner[TEACHER].overall.items() if score is not None
        }
        state.teacher_held_out = known
        self._rank(learners, by_learner, state.step)
        return by_learner

    def _of_weights(
        self, learner: Learner, scorer: Scorer, trained: Collection[str], step: int
    ) -> Scores:
        """The scores of a learner with the weights that it has now, after `step` steps."""
        data = self._config.data
        last = batch_number(max(step - 1, 0), self._config.rollback)
        next_tokens = data.scores_next_tokens_at(last)
        where = (self._device, dist.get_rank(), dist.get_world_size(), next_tokens)
        scores = self._validation.evaluate(scorer, learner.metrics, *where)
        shown = scores.of_trained_heads(learner.metrics, trained, data.tasks)
        return shown.prefixed(OF_NEXT_TOKENS) if next_tokens else shown

    def _rank(self, learners: Learners, by_learner: Mapping[str, Scores], step: int) -> None:
        """Note the primary scores of the learners that are trained."""
        scores: dict[str, float] = {}
        for ranking in self._config.rankings:
            learner = learners.by_name.get(ranking.learner)
            if learner is None or not learner.is_trained or ranking.learner not in by_learner:
                continue
            score = by_learner[ranking.learner].overall.get(ranking.metric)
            if score is not None and math.isfinite(score):
                scores[ranking.learner] = score
                learner.counters.record_score(ranking, score, step)
                best, stages = learner.counters.best, learner.objective.stages
                if best is not None and learner.own_step(step) <= stages.last_begins:
                    best.evaluations = 0  # patience is for the last stage
        self._scores = step, scores

    def setbacks(self, learners: Learners, state: JobState) -> list[Setback]:
        """Setbacks of active students, from the newest evaluation."""
        at_work = {learner.name for learner in (learners.teacher, *learners.active)}
        tokenizers = {name: it.config.tokenizer for name, it in learners.by_name.items()}
        # Only losses of the same tokens can be compared with the baseline's and the teacher's.
        losses = {
            name: curve
            for name, curve in state.held_out.items()
            if name in at_work and tokenizers[name] is None
        }
        warm_ups = {learner.name: learner.warm_up_ends(state.step) for learner in learners.active}
        return setbacks(self._config, state.step, losses, warm_ups, self.unigram.get("loss"))

    def scores_at(self, step: int) -> dict[str, float]:
        """The learners' primary scores, which rank checkpoints, if they were just measured."""
        return self._scores[1] if self._scores[0] == step else {}


def _scorer(learner: Learner, learners: Mapping[str, Learner]) -> Scorer:
    """How a learner scores a batch, beside the heads with which its metrics compare.

    That of a discriminator gets its generator's samples.
    """
    if learner.generator is None:

        def beside_teachers(batch: MicroBatch) -> Sequence[Tensor]:
            compared = compared_heads(learner.metrics, batch).items()
            teachers = {name: learners[name].heads(batch, heads) for name, heads in compared}
            return learner.evaluate(batch, teachers)

        return beside_teachers
    learner.share_embedding(learners)
    name, generator = learner.generator, learners[learner.generator]
    projection = generator.output_projection()

    def score(batch: MicroBatch) -> Sequence[Tensor]:
        told = generator.predictions(batch, projection)
        return learner.evaluate(with_view(batch, name, told.distributions[MASKED], SEED))

    return score
