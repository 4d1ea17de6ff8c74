"""The schema of a learner in a job YAML: the `teacher` section, and each of the `students`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

import trainer.tasks  # noqa: F401 - their terms are keys of an objective
from configs.rules import (
    COUNT,
    FRACTION,
    HOURS,
    INDEX,
    NOT_EMPTY,
    PROBABILITY,
    WEIGHT,
    Doc,
    OneOf,
    Range,
    Unit,
    positive,
)
from configs.section import Refusal, Section, within
from model import Ability, ModelConfig, ModelShape, default_model
from trainer.objectives import Objective, ObjectiveConfig
from trainer.objectives.progressive import ProgressiveConfig, Transfer
from trainer.objectives.task import TaskConfig
from trainer.optimizers import OptimizerConfig
from trainer.optimizers.loss_scale import LossScaleConfig
from trainer.schedules.learning_rate import ScheduleConfig
from trainer.schedules.stacking import StackingConfig
from trainer.scoring.scores import Metrics, metrics_of
from trainer.watch.guard import GuardConfig

FROZEN_STAGES = (0, 3)
PRECISIONS = ("fp32", "bf16", "fp16")
OFFLOADS = {"none": 0, "optimizer": 1, "parameters": 3}  # and the least ZeRO stage for each
# What a key asks of the model.
_ABILITIES = {
    "freeze_positions": Ability.FREEZE_POSITIONS,
    "progressive": Ability.LAYER_BY_LAYER,
    "masked_only": Ability.MASKED_ONLY,
    "checkpoint_activations": Ability.CHECKPOINT,
    "compile": Ability.COMPILE,
}
_FOR_TRAINING = (
    "objective", "optimizer", "schedule", "loss_scale", "gradient_clipping", "guard",
    "dropout", "checkpoint_activations", "stacking", "freeze_positions", "encoder",
)  # fmt: skip


@dataclass
class ThresholdConfig(Section):
    """A held-out score (`evaluation.every`) that is at least, or at most, a number."""

    metric: Annotated[
        str | None,
        NOT_EMPTY,
        Doc(
            "The score; null: that of evaluation.metric. loss_over_unigram and "
            "accuracy_over_unigram are what it has over guessing by frequency."
        ),
    ] = None
    at_least: Annotated[float | None, Range(-1000, 1000), Doc("Reached from this on up.")] = None
    at_most: Annotated[float | None, Range(-1000, 1000), Doc("Reached from this on down.")] = None

    def conflicts(self) -> Iterator[Refusal]:
        if (self.at_least is None) == (self.at_most is None):
            yield "at_least", "set either this or at_most"


@dataclass
class StartConfig(Section):
    """When a student joins: at a step, and once the teacher has reached a threshold."""

    step: Annotated[int, INDEX, Unit("steps"), Doc("The job's step from which it may join.")] = 0
    fraction: Annotated[
        float | None, FRACTION, Doc("Or the fraction of the job's steps after which it may.")
    ] = None
    teacher: Annotated[
        ThresholdConfig | None, Doc("What the teacher has to score; null: nothing.")
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if self.step and self.fraction is not None:
            yield "fraction", "set either this or step"

    def in_steps(self, steps: int) -> StartConfig:
        """The same, without a fraction, in a job of so many steps."""
        if self.fraction is None:
            return self
        return dataclasses.replace(self, step=round(self.fraction * steps), fraction=None)


@dataclass
class BudgetConfig(Section):
    """A learner's own budget, counted from its start; without one it trains to the job's end.

    Its schedule runs over the budget, and the first of them that is used up ends its training. A
    student is then done. A teacher goes on teaching as a finished one, at the cost of its forward.
    A step takes as long as it takes, so that no two runs with `hours` are the same.
    """

    steps: Annotated[int | None, COUNT, Unit("steps"), Doc("Its own steps.")] = None
    fraction: Annotated[
        float | None, positive(1.0), Doc("Or its own steps as a fraction of the job's.")
    ] = None
    tokens: Annotated[int | None, COUNT, Unit("tokens"), Doc("Tokens that it has read.")] = None
    hours: Annotated[
        float | None,
        HOURS,
        Unit("hours"),
        Doc("Time in training, over all restarts, without a progressive transfer."),
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if self.steps is not None and self.fraction is not None:
            yield "fraction", "set either this or steps"

    def in_steps(self, steps: int) -> BudgetConfig:
        """The same, without a fraction, in a job of so many steps."""
        if self.fraction is None:
            return self
        own = max(1, round(self.fraction * steps))
        return dataclasses.replace(self, steps=own, fraction=None)


@dataclass
class InitConfig(Section):
    """Where a learner's first weights come from; at random when nothing is set."""

    teacher_layers: Annotated[
        list[int] | None,
        Doc("A student's layers begin as these of its teacher, counted from 0, as they then are."),
    ] = None
    teacher_embeddings: Annotated[
        bool, Doc("Embeddings and heads begin as the teacher's, as they then are.")
    ] = False
    pretrained: Annotated[
        str | None, NOT_EMPTY, Doc("A folder in Hugging Face format, or an export.")
    ] = None
    seed: Annotated[
        int | None,
        INDEX,
        Doc(
            "Random weights are drawn with this seed: equal models with equal seeds begin alike. "
            "null: with the job's seed and the learner's name."
        ),
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        origins = (self.teacher_layers, self.teacher_embeddings or None, self.pretrained)
        if sum(origin is not None for origin in origins) > 1:
            yield "pretrained", "set one of this, teacher_layers and teacher_embeddings"


@dataclass
class LearnerConfig(Section):
    """A model being trained, and how."""

    model: ModelConfig = field(default_factory=default_model)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    progressive: ProgressiveConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    start: StartConfig = field(default_factory=StartConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    init: InitConfig = field(default_factory=InitConfig)
    min_lead: Annotated[
        float | None,
        positive(100.0),
        Unit("nats"),
        Doc(
            "A student's terms about a teacher that still learns are off until the teacher's loss "
            "is this much lower than its own, and count in full from twice that on; null: always."
        ),
    ] = None
    masked_only: Annotated[
        bool,
        Doc(
            "Of a teacher: its last layer computes the masked positions only, up to 12% less work, "
            "or the first tokens only, where a task reads no others; students learn from its "
            "predictions there only. A student does so by itself."
        ),
    ] = False
    stacking: StackingConfig = field(default_factory=StackingConfig)
    frozen: Annotated[
        bool, Doc("A finished teacher: it is read, not trained (offline distillation).")
    ] = False
    freeze_positions: Annotated[
        bool, Doc("The position embeddings stay as they begin (DistilBERT).")
    ] = False
    encoder: Annotated[
        str,
        OneOf("trained", "frozen"),
        Doc("frozen: embeddings and layers stay as they begin, and only heads are trained."),
    ] = "trained"
    zero_stage: Annotated[
        int, OneOf(0, 1, 2, 3), Doc("DeepSpeed's ZeRO stage: what the ranks partition.")
    ] = 0
    offload: Annotated[
        str,
        OneOf(*OFFLOADS),
        Doc("optimizer: its states are in host memory; parameters: both are."),
    ] = "none"
    precision: Annotated[
        str,
        OneOf(*PRECISIONS),
        Doc("Of matrix products; parameters and optimizer states stay float32."),
    ] = "fp32"
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    gradient_clipping: Annotated[
        float, WEIGHT, Doc("The largest norm of the gradients; 0: no clipping.")
    ] = 1.0
    guard: GuardConfig = field(default_factory=GuardConfig)
    dropout: Annotated[
        float,
        PROBABILITY,
        Doc("Hidden and attention dropout while it trains here; exports keep the model's own."),
    ] = 0.0
    checkpoint_activations: Annotated[
        bool, Doc("Keep each layer's input only, and compute the rest again.")
    ] = False
    compile: Annotated[
        bool, Doc("Pass each half of a layer through torch.compile; below ZeRO stage 3.")
    ] = False

    def conflicts(self) -> Iterator[Refusal]:
        yield from self._conflicts_with_zero()
        if self.frozen:
            yield from self._conflicts_with_frozen()
        for key, ability in _ABILITIES.items():
            if getattr(self, key) and (why := self.model.cannot(ability)):
                yield key, why
        if self.progressive is not None:
            yield from self._conflicts_with_progressive()
        yield from self.stacking.conflicts_with(self.model)
        if self.stacking.steps and self.init.pretrained:
            yield "stacking", "begins with random weights; remove it, or init.pretrained"
        yield from within("objective", self.objective.unequippable(self.model))

    def finished(self) -> LearnerConfig:
        """A teacher's, once its budget is used up: that of a frozen one with its weights."""
        kept = {key: getattr(LearnerConfig(), key) for key in _FOR_TRAINING}
        return dataclasses.replace(
            self,
            **kept,
            model=self.architecture,
            frozen=True,
            init=InitConfig(pretrained="its own"),
            budget=BudgetConfig(),
            zero_stage=3 if self.zero_stage == 3 else 0,
            offload="parameters" if self.offload == "parameters" else "none",
        )

    @property
    def architecture(self) -> ModelConfig:
        """The `model` with the heads that its objective trains: what is built, and exported."""
        return self.objective.equip(self.model)

    def metrics_among(self, learners: Iterable[LearnerConfig]) -> Metrics:
        """What its heads are scored by: the metrics of a task, or those of the head.

        A frozen teacher has no objective: its head has the metrics of the one among `learners`, all
        of its job, that has the task.
        """
        terms = (term for one in learners for term in one.objective.terms().values())
        tasks = {one.head: one.own_metrics() for one in terms if isinstance(one, TaskConfig)}
        return metrics_of(self.architecture, tasks)

    def with_layers(self, layers: int) -> LearnerConfig:
        """The same with a model that has this many layers, and stays so."""
        if layers == self.model.layers and not self.stacking.steps:
            return self
        model = self.model.with_layers(layers)
        return dataclasses.replace(self, model=model, stacking=StackingConfig())

    def _conflicts_with_zero(self) -> Iterator[Refusal]:
        """What DeepSpeed would refuse later, or less clearly."""
        if self.compile and self.zero_stage == 3:
            yield "compile", "must be false at zero_stage 3, which cuts layers into pieces"
        if self.zero_stage < OFFLOADS[self.offload]:
            yield "offload", f"{self.offload} needs zero_stage {OFFLOADS[self.offload]} or higher"

    def _conflicts_with_progressive(self) -> Iterator[Refusal]:
        """Progressive transfer is between layers, each with weights of its own."""
        if not self.objective.between_layers() or not self.objective.beyond_layers():
            why = "objective must have terms between layers, and others for afterwards"
            yield "progressive", why

    def _conflicts_with_frozen(self) -> Iterator[Refusal]:
        """A frozen learner has nothing but a model and where it comes from."""
        if self.init.pretrained is None:
            yield "init.pretrained", "must be set where frozen is true"
        if self.zero_stage not in FROZEN_STAGES:
            stages = " or ".join(map(str, FROZEN_STAGES))
            why = f"must be {stages} where frozen is true; the others partition what training needs"
            yield "zero_stage", why
        if self.offload == "optimizer":
            yield "offload", "must be none or parameters where frozen is true"
        for key in _FOR_TRAINING:
            if getattr(self, key) != getattr(LearnerConfig(), key):
                yield key, "is for training; remove it (null), or frozen"

    def build_objective(self, teacher: ModelShape, seed: int) -> Objective:
        """The terms between this model and its `teacher`'s; ValueError where one does not fit."""
        transfer = Transfer(self.progressive, self.model.layers) if self.progressive else None
        objective = Objective(self.objective, self.model, teacher, seed, transfer)
        objective.heard_changes = self.min_lead is not None
        return objective
