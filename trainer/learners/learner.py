"""A learner: a model in training, with its objective, optimizer, schedule and engine.

A frozen teacher is a learner without objective and optimizer: it only runs forward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline import PAIRS, Batch
from model import Capture, Features, Model, ModelConfig
from model.protocol import NOTHING
from trainer.batch_config import MicroStep, StepShape
from trainer.batches import MicroBatch
from trainer.checkpoint.reader import Checkpoint
from trainer.denominators import InView, Totals
from trainer.device import own_device
from trainer.learner_config import DISENTANGLED, LearnerConfig
from trainer.learner_names import BACKWARD, FORWARD, STEP, derive, is_student, section_of
from trainer.learners import engine as engines
from trainer.learners.module import (
    WORD_EMBEDDING,
    LearnerModule,
    Predict,
    Program,
    Score,
    Train,
    always_captured,
    build_module,
    is_compiled,
    require_products,
)
from trainer.learners.state import LearnerState, schedule_steps, time_used
from trainer.learners.zero import whole_copies
from trainer.measure import clock
from trainer.objectives import Objective
from trainer.objectives.objective import union
from trainer.objectives.shared_spans import SharedSpans, coverage
from trainer.objectives.term import ExampleLosses, Term
from trainer.optimizers.gated import GatedOptimizer, LossScale, build_optimizer, gradient_factor
from trainer.schedules import factor
from trainer.scoring.scores import NO_TEACHERS, Metrics, TeacherHeads
from trainer.teacher_outputs import OutputProjection, TeacherOutputs, detach

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

Result = TypeVar("Result")
LEAD_STEPS = 50  # time constant of the running mean of a teacher's lead


class Learner:
    """One model in training. All methods are collective: every rank calls each of them."""

    # Facts about the last step.
    rate = math.nan
    gradient_norm = math.nan
    skipped: str | None = None  # the reason, if it was skipped

    def __init__(
        self,
        name: str,
        config: LearnerConfig,
        teacher: ModelConfig,
        step_shape: StepShape,
        started_at: int = 0,
        weights: Mapping[str, Tensor] | None = None,
        metrics: Metrics | None = None,
        others: Mapping[str, ModelConfig] | None = None,
        shared: Mapping[str, SharedSpans] | None = None,
        is_compared: bool = False,
    ) -> None:
        """Build the model (from `weights` where given, else at random) and start its engine.

        `started_at` is the job's step at which this learner began. `metrics` score it; None means
        the metrics of its own objective and heads. Its terms may read its `teacher`, or further
        teachers: `others`, by name. `shared` says how it compares with the sources that have other
        tokenizers. If it `is_compared`, its terms with a `min_lead` are weighed by how far the
        teacher is ahead. Raises TrainingError when the `weights` do not fit.
        """
        config = config.in_steps(step_shape.steps)
        self.name, self.config, self.step_shape, self.view = name, config, step_shape, config.form
        self.generator = config.generator_name
        self.reads = self.generator or self.view  # the view that it reads; it counts `view`
        self.is_trained = not config.frozen
        self.counters = LearnerState(started_at)
        section, rows = section_of(name), step_shape.micro_batch
        self._named_for = partial(engines.named_for, section, config, micro_batch=rows)
        self._always = always_captured(name, config)
        require_products(name, config, own_device())
        with self._named_for(engines.BEGINNING):
            module = build_module(name, config, teacher, step_shape.seed, weights, others)
            self.objective: Objective = module.objective
            # Terms are computed where it is trained, or its losses are compared (min_lead).
            self.has_terms = bool(self.objective.terms)
            self.engine = self._start_engine(module)
        self.model: Model = module.model
        heads = self.model.config.task_heads.values()
        self._has_dropout = bool(config.dropout or any(head.dropout for head in heads))
        self.device: torch.device = self.engine.device
        self.is_compiled = is_compiled(config, self.device)
        if self.is_compiled:
            has_own_rows = config.tokenizer is not None
            module.compile_parts(dynamic=step_shape.is_ragged or has_own_rows)
        self.metrics = config.metrics_among([config]) if metrics is None else metrics
        on_device = {name: spans.to(self.device) for name, spans in (shared or {}).items()}
        self.objective.set_views(self.view, on_device)
        self.objective.lead = (lambda: self.counters.lead) if is_compared else None
        self._shares = torch.zeros(len(self.objective.terms), device=self.device)
        self._teacher_layers = teacher.layers
        self._peers: tuple[str, ...] = ()  # the students whose outputs it read in the last step
        self.whole_batch: list[Mapping[Term, ExampleLosses]] = []  # see `trainer.step`

    def _start_engine(self, module: LearnerModule) -> DeepSpeedEngine:
        self._optimizer: GatedOptimizer | None = None
        if self.is_trained:
            masters = self.config.rounds_weights and self.config.zero_stage == 0
            self._optimizer = build_optimizer(
                module, self.config.optimizer, self.objective, masters=masters
            )
            if self.config.clip_each_parameter:
                self._optimizer.clipping = self.config.gradient_clipping
        cut = self.step_shape.micro_batch, self.step_shape.accumulation
        engine = engines.start_engine(module, self._optimizer, self.config, *cut)
        engine.train(self.config.in_training_mode)
        return engine

    def load(self, checkpoint: Checkpoint) -> None:
        """Load its weights and optimizer states from a checkpoint."""
        checkpoint.load(self.name, self.engine, has_average=self.config.average is not None)

    def resume(self, checkpoint: Checkpoint, counters: LearnerState) -> None:
        """Continue from a checkpoint, with the counters that are stored there."""
        self.load(checkpoint)
        self.counters = counters

    @cached_property
    def counted(self) -> set[InView]:
        """The counts that divide its terms, each with its view."""
        return self.objective.denominators

    @cached_property
    def coverage(self) -> dict[str, tuple[InView, InView]]:
        """Metrics of how much its terms compare across tokenizers; see `coverage`."""
        return coverage(self.name, self.view, self.counted)

    @torch.no_grad()
    def heads_ahead(
        self, batch: MicroBatch, micro_step: MicroStep, heads: Collection[str] = ()
    ) -> Mapping[str, Tensor]:
        """The outputs of heads for a micro-batch, as its pass in the step will compute them.

        These are the heads that its own terms read, and the given `heads`.
        """
        own_step = self.own_step(micro_step.step)
        read = self.objective.student_capture(own_step, batch.targets)
        capture = union([self._always, read, Capture(heads=tuple(heads))])
        self._seed_dropout(micro_step)
        with self._part(FORWARD):
            features: Features = self.engine(Predict(capture), batch.view(self.reads))
        return features.heads

    def accumulate(
        self,
        batch: MicroBatch,
        totals: Totals,
        micro_step: MicroStep,
        sources: Mapping[str, TeacherOutputs] | None = None,
        capture: Capture = NOTHING,
    ) -> Features:
        """Run one micro-batch forward and, if the learner is trained, backward.

        `sources` are the outputs of other learners that its terms may read. The returned features
        hold at least what `capture` asks for.
        """
        if micro_step.micro_batch == 0 and self.is_trained and self.config.zero_stage:
            engines.forget_gradients(self.engine)
        self.engine.set_gradient_accumulation_boundary(micro_step.is_last)
        self._seed_dropout(micro_step)
        sources = sources or {}
        self._peers = tuple(sorted(filter(is_student, self.objective.sources & sources.keys())))
        own_step = self.own_step(micro_step.step)
        read = self.objective.student_capture(own_step, batch.targets)
        capture = union([capture, self._always, read])
        with self._part(FORWARD):
            whole_batch = self.whole_batch.pop(0) if self.whole_batch else {}
            program = Train(totals, sources, capture, own_step, whole_batch, batch.views)
            loss, shares, features = self.engine(program, batch.view(self.reads))
        if self.is_trained:
            with self._part(BACKWARD):
                engines.backward(self.engine, loss, self.loss_scale.value)
        if self.has_terms:
            self._shares += shares.detach()
        return features

    def turn_positions(self, step: int) -> None:
        """Set the base of rotary positions for all forward passes of the job's `step`.

        The base is that of the step, or of the last one that trained the model.
        """
        finished = self.counters.finished_at
        if self.step_shape.phases and (self.is_trained or finished is not None):
            last = step if finished is None else min(step, finished - 1)
            if (base := self.step_shape.rope_theta(last)) is not None:
                self.model.set_rope_theta(base)

    def _seed_dropout(self, micro_step: MicroStep) -> None:
        if self._has_dropout:
            step, micro_batch, rank = micro_step.step, micro_step.micro_batch, dist.get_rank()
            torch.manual_seed(derive(self.step_shape.seed, self.name, step, micro_batch, rank))

    @contextlib.contextmanager
    def _part(self, part: str) -> Iterator[None]:
        """Time this part of the step if asked to, and name it if memory runs out."""
        nothing = contextlib.nullcontext()
        with (
            self._named_for(part),
            clock.part(self.name, part) if clock.running else nothing,
            engines.partitioned_linear() if self.config.zero_stage == 3 else nothing,
        ):
            yield

    def take_sums(self) -> Tensor:
        """This rank's share of each term over the step, and of the squared norm of the gradient.

        Float64 [terms + 1], after the step's last backward pass. The shares begin anew at 0.
        """
        shares, self._shares = self._shares, torch.zeros_like(self._shares)
        if self.is_trained:
            squared_norm = engines.squared_norm_part(self.engine)
        else:
            squared_norm = torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.cat([shares.double(), squared_norm[None]])

    def update(
        self, step: int, loss: float, squared_norm: float, seconds: float, batch: Batch
    ) -> None:
        """Take the job's `step`, or skip it if loss or gradient is non-finite or the loss spikes.

        `loss` is the loss of the global batch, of which `batch` is this rank's part; `squared_norm`
        is the ranks' sum, of `take_sums`; `seconds` is the job's training time so far, which is
        equal on all ranks.
        """
        assert self._optimizer is not None
        own_step, stages = self.own_step(step), self.objective.stages
        if own_step <= stages.last_begins or self.counters.clocked_from is None:
            self.counters.clocked_from = seconds
        if stages.begins(own_step):
            self._optimizer.forget()  # the moments of the stage before, even when skipping
        self._set_rates(step, seconds, batch.targets)
        config, task = self.config, self.objective.task_among(batch.targets)
        reason = self.counters.guard.judge(config.guard, loss, self._regime(step, batch), task)
        scale = engines.gradient_scale(self.loss_scale.value)
        norm = self.gradient_norm = math.sqrt(squared_norm) / scale
        is_taken = reason is None and math.isfinite(norm)
        together = 0.0 if config.clip_each_parameter else config.gradient_clipping
        wanted = gradient_factor(norm, together, scale)
        self._optimizer.gradient_factor = wanted if is_taken else None
        if config.average is not None:
            self._optimizer.mean_kept = config.average.kept(self.counters.steps_taken(step))
        with self._part(STEP):
            self.engine.step()
        if is_taken:
            self.skipped = None
            self.counters.record_step(config, loss, task, norm, self.loss_scale)
        else:
            self.skipped = self.counters.record_skip(reason, self.loss_scale)

    def _regime(self, step: int, batch: Batch) -> str:
        """A key of the facts that comparable losses share: terms, dropout, models, kind of batch.

        A weight or temperature that reaches the next segment of its schedule may make the loss
        jump, so the segments are part of the key.
        """
        config, objective, own_step = self.config, self.objective, self.own_step(step)
        weights = objective.weights(own_step)
        terms = {n: t.segments(own_step) for n, t in objective.by_name.items() if weights[n]}
        captures = objective.student_capture(own_step), objective.source_capture(own_step)
        models = config.model.layers, self._teacher_layers, self._peers
        length = 0 if batch.is_trimmed else batch.input_ids.shape[-1]
        kind = length, PAIRS in batch.targets, *self.step_shape.phase(step)
        conditions = *models, objective.lead is not None, *kind
        shared = config.objective, config.dropout, terms, captures, conditions
        return f"{derive(repr(shared)):x}"

    def _set_rates(self, step: int, seconds: float, targets: Collection[str]) -> None:
        self.rate, own_step = self.learning_rate(step, seconds), self.own_step(step)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.rate * self.objective.factor(group["name"], own_step, targets)

    def record_lead(self, ours: Mapping[str, float], theirs: Mapping[str, float]) -> None:
        """After a step: update the running mean of how much lower the teacher's loss is.

        The loss here is the sum of the terms that both learn from labels.
        """
        shared = [name for name in self.objective.label_terms if name in theirs]
        lead = sum(ours[name] - theirs[name] for name in shared)
        if math.isfinite(lead):
            self.counters.lead += (lead - self.counters.lead) / LEAD_STEPS

    def set_teacher_layers(self, teacher_layers: int) -> None:
        """Learn from a teacher that now has this many layers."""
        self.objective.set_teacher_layers(teacher_layers)
        self._teacher_layers = teacher_layers

    @property
    def loss_scale(self) -> LossScale:
        """The factor on the loss before the backward pass: 1 unless the precision is fp16."""
        if self.config.precision != "fp16":
            return LossScale(1.0)
        return self.counters.loss_scale or LossScale(self.config.loss_scale.initial)

    def own_step(self, step: int) -> int:
        """The learner's own step at the job's `step`: 0 at its start."""
        return step - self.counters.started_at

    def returns_to_best(self, step: int) -> bool:
        """Whether the job's `step` begins a stage that follows the best weights before it."""
        stage, done = self.objective.stages.at(self.own_step(step))
        return stage.from_best and done == 0

    def learning_rate(self, step: int, seconds: float = 0.0) -> float:
        """The learning rate at the job's `step`, after `seconds` of training.

        A schedule runs over each stage that has no constant rate. The schedule of the last stage
        ends with the budget.
        """
        config, stages = self.config, self.objective.stages
        stage, done = stages.at(self.own_step(step))
        peak = stage.learning_rate or config.optimizer.learning_rate
        if not stage.is_scheduled:
            return peak
        if stage.steps is not None:
            return peak * factor(config.schedule, done, stage.steps)
        used = time_used(config.budget, self.counters, seconds, self.step_shape.seconds)
        length = schedule_steps(config.budget, self.counters, step, self.step_shape.steps)
        return peak * factor(config.schedule, done, length - stages.last_begins, used)

    def warm_up_ends(self, step: int) -> float:
        """The own step at which the warm-up of its schedule ends, as known at the job's `step`."""
        begins, last = self.objective.stages.last_begins, self.step_shape.steps
        length = schedule_steps(self.config.budget, self.counters, step, last)
        return begins + self.config.schedule.warmup(length - begins)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """This learner's precision, and fused losses if it is compiled."""
        return self.engine.module.autocast(self.device)

    def output_projection(self) -> OutputProjection:
        """The vocabulary projection, detached and gathered; a copy only at ZeRO stage 3."""
        parts = self.model.projection_parts()
        if self.config.zero_stage == 3:
            named = {name: part for name, part in parts._asdict().items() if part is not None}
            gathered = whole_copies([*named.values()])
            parts = parts._replace(**dict(zip(named, gathered, strict=True)))
        return OutputProjection(*self.model.output_projection(parts)).detached()

    def share_embedding(self, learners: Mapping[str, Learner]) -> None:
        """Read the present word embedding of its generator, if it shares that embedding."""
        if self.config.embedding_sharing == DISENTANGLED:
            assert self.generator is not None
            generator = learners[self.generator]
            table: Tensor = generator.model.get_parameter(WORD_EMBEDDING)
            if generator.config.zero_stage == 3:
                (table,) = whole_copies([table])
            self.model.share_embedding(table.detach())

    def predictions(self, batch: MicroBatch, projection: OutputProjection) -> TeacherOutputs:
        """Predictions at masked positions, without dropout, for others to learn from.

        `projection` is this learner's own vocabulary projection.
        """
        features = self._evaluated(Predict(), batch)
        with self.autocast():
            return detach(features, projection)

    def evaluate(
        self, batch: MicroBatch, teachers: TeacherHeads = NO_TEACHERS
    ) -> tuple[Tensor, ...]:
        """The readings of the learner's metrics from this rank's `batch`.

        `teachers` are as in `ScoreInputs`.
        """
        return self._evaluated(Score(self.metrics, teachers), batch)

    def heads(self, batch: MicroBatch, names: Collection[str]) -> Mapping[str, Tensor]:
        """The outputs of these heads for this rank's `batch`, without dropout."""
        return self._evaluated(Predict(Capture(heads=tuple(names))), batch).heads

    @torch.no_grad()
    def _evaluated(self, program: Program[Result], batch: MicroBatch) -> Result:
        self.engine.eval()
        with self._named_for(engines.EVALUATION):
            result: Result = self.engine(program, batch.view(self.reads))
        self.engine.train(self.config.in_training_mode)
        return result

    @property
    def has_average(self) -> bool:
        """Whether it has averaged weights by now."""
        return self.config.average is not None and engines.has_means(self.engine)

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """In the block the learner has its averaged weights."""
        return engines.averaged(self.engine)
