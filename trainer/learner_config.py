"""The schema of a learner in a job YAML: the `teacher` section, and each of the `students`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from configs import bounds
from configs.bounds import COUNT, INDEX, require_bounds, require_choice
from model import EncoderConfig
from trainer.objectives import Objective, ObjectiveConfig
from trainer.objectives.progressive import ProgressiveConfig, Transfer
from trainer.optimizers import OptimizerConfig
from trainer.optimizers.loss_scale import LossScaleConfig
from trainer.schedules.learning_rate import ScheduleConfig
from trainer.schedules.stacking import StackingConfig
from trainer.watch.guard import GuardConfig

ZERO_STAGES = (0, 1, 2, 3)
FROZEN_STAGES = (0, 3)
PRECISIONS = ("fp32", "bf16", "fp16")
OFFLOADS = {"none": 0, "optimizer": 1, "parameters": 3}  # and the least ZeRO stage for each


@dataclass
class StartConfig:
    """When a student joins: at `step`, and once every threshold that is set has been reached.

    The thresholds are read from the teacher's held-out evaluation (`evaluation.every`).
    """

    step: int = 0
    teacher_loss: float | None = None
    teacher_accuracy_over_unigram: float | None = None  # 0.1: ten points better

    def __post_init__(self) -> None:
        """Refuse what never comes."""
        require_bounds(
            self,
            step=INDEX,
            teacher_loss=bounds.positive(1000.0),
            teacher_accuracy_over_unigram=(-1.0, 1.0),
        )


@dataclass
class BudgetConfig:
    """A student's own budget, counted from its start; without one it goes on to the job's end.

    Its schedule runs over the budget. The first of them that is used up ends it. A step takes as
    long as it takes, so that no two runs with `hours` are the same.
    """

    steps: int | None = None
    tokens: int | None = None
    hours: float | None = None  # of training, over all restarts; without a progressive transfer

    def __post_init__(self) -> None:
        """Refuse budgets of nothing."""
        require_bounds(self, steps=COUNT, tokens=COUNT, hours=bounds.HOURS)


@dataclass
class InitConfig:
    """Where a learner's first weights come from; at random when nothing is set."""

    teacher_layers: list[int] | None = None  # 0-based, as they are when the student starts
    teacher_embeddings: bool = False  # and heads, as they are then; layers at random
    pretrained: str | None = None  # a folder in Hugging Face format

    def __post_init__(self) -> None:
        """Refuse two origins, and one that is empty."""
        if self.pretrained == "":
            raise ValueError("pretrained: must name a folder, or be null")
        origins = (self.teacher_layers, self.teacher_embeddings or None, self.pretrained)
        if sum(origin is not None for origin in origins) > 1:
            raise ValueError("pretrained: set one of this, teacher_layers and teacher_embeddings")


@dataclass
class LearnerConfig:
    """A model being trained, and how."""

    model: EncoderConfig = field(default_factory=EncoderConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    progressive: ProgressiveConfig | None = None  # layer by layer first (MobileBERT)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    start: StartConfig = field(default_factory=StartConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    init: InitConfig = field(default_factory=InitConfig)
    # Of a teacher: its last layer computes the masked positions only, up to 12% less work, and
    # students learn from its predictions there only. A student does so whenever its terms allow.
    masked_only: bool = False
    stacking: StackingConfig = field(default_factory=StackingConfig)  # of a teacher
    frozen: bool = False  # a finished teacher: it is read, not trained (offline distillation)
    freeze_positions: bool = False  # the position embeddings stay as they begin (DistilBERT)
    zero_stage: int = 0
    offload: str = "none"  # optimizer: its states in host memory; parameters: both
    precision: str = "fp32"  # of matrix products; parameters and optimizer states stay float32
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)  # for fp16
    gradient_clipping: float = 1.0  # 0: off
    guard: GuardConfig = field(default_factory=GuardConfig)
    dropout: float = 0.0  # hidden and attention, while training here; exports keep the model's own
    checkpoint_activations: bool = False  # keep a layer's input only, compute the rest again
    compile: bool = False  # each half of a layer through torch.compile, below ZeRO-3

    def __post_init__(self) -> None:
        """Refuse what DeepSpeed would refuse later, or less clearly."""
        require_choice(self, zero_stage=ZERO_STAGES, precision=PRECISIONS, offload=OFFLOADS)
        require_bounds(self, gradient_clipping=bounds.WEIGHT)
        if self.compile and self.zero_stage == 3:
            raise ValueError(
                "compile: must be false at zero_stage 3, which cuts layers into pieces"
            )
        if self.zero_stage < OFFLOADS[self.offload]:
            least = OFFLOADS[self.offload]
            raise ValueError(f"offload: {self.offload} needs zero_stage {least} or higher")
        if not 0 <= self.dropout < 1:
            raise ValueError("dropout: must be from 0 up to 1")
        if self.frozen:
            self._refuse_training()
        if self.freeze_positions and self.model.positions == "rotary":
            raise ValueError("freeze_positions: rotary positions have no weights; remove it")
        if self.progressive is not None:
            self._require_layers()
        self.stacking.require_fit(self.model)
        if self.stacking.steps and self.init.pretrained:
            raise ValueError("stacking: begins with random weights; remove it, or init.pretrained")
        if self.objective.needs_pair_head():
            if self.model.pooler == "none":
                raise ValueError("model.pooler: pairs are read from it; set it to tanh or first")
            self.model = dataclasses.replace(self.model, pair_head=True)

    def build_objective(self, teacher: EncoderConfig, seed: int) -> Objective:
        """The terms between this model and its `teacher`'s; ValueError where one does not fit."""
        transfer = Transfer(self.progressive, self.model.layers) if self.progressive else None
        return Objective(self.objective, self.model, teacher, seed, transfer)

    def _require_layers(self) -> None:
        """Progressive transfer is between layers, each with weights of its own."""
        if not self.objective.between_layers() or not self.objective.beyond_layers():
            raise ValueError(
                "progressive: objective must have terms between layers, and others for afterwards"
            )
        if self.model.sharing != "none":
            raise ValueError("progressive: needs layers that share nothing; set model.sharing")

    def _refuse_training(self) -> None:
        """A frozen learner has nothing but a model and where it comes from."""
        if self.init.pretrained is None:
            raise ValueError("init.pretrained: must be set where frozen is true")
        if self.zero_stage not in FROZEN_STAGES:
            raise ValueError(
                f"zero_stage: must be one of {FROZEN_STAGES} where frozen is true: "
                f"the others partition what training needs"
            )
        if self.offload == "optimizer":
            raise ValueError("offload: must be none or parameters where frozen is true")
        for key in (
            "objective", "optimizer", "schedule", "loss_scale", "gradient_clipping", "guard",
            "dropout", "checkpoint_activations", "stacking", "freeze_positions",
        ):  # fmt: skip
            if getattr(self, key) != getattr(LearnerConfig(), key):
                raise ValueError(f"{key}: is for training; remove it (null), or frozen")
