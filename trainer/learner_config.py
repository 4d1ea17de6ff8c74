"""The schema of a learner in a job YAML: the `teacher` section, and each of the `students`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import trainer.tasks  # noqa: F401 - their terms are keys of an objective
from configs.rules import NOT_EMPTY, PATH, PROBABILITY, WEIGHT, OneOf
from configs.section import Refusal, Section, within
from data_pipeline import DEFAULT_VIEW
from model import Ability, ModelConfig, default_model
from trainer.learner_life import BudgetConfig, InitConfig, StackingConfig, StartConfig
from trainer.learner_names import learner_key
from trainer.objectives import ObjectiveConfig
from trainer.objectives.stages import (
    LAYERS,
    STATES,
    IntermediateConfig,
    ProgressiveConfig,
    Stages,
    StagesConfig,
    TaskFirstConfig,
)
from trainer.optimizers.config import AverageConfig, OptimizerConfig, optimizer_config
from trainer.optimizers.gated import LossScaleConfig
from trainer.schedules import ScheduleConfig, schedule_config
from trainer.scoring.scores import Metrics, metrics_of
from trainer.stored_logits.format import StoredConfig
from trainer.watch.guard import GuardConfig

FROZEN_STAGES = (0, 3)
PRECISIONS = ("fp32", "bf16", "bf16_weights", "fp16", "fp8")
BF16_WEIGHTS = ("bf16_weights", "fp8")
COMMUNICATIONS = ("fp32", "bf16")
SEPARATE, DISENTANGLED = "none", "disentangled"  # of `embedding_sharing`
OFFLOADS = {"none": 0, "optimizer": 1, "parameters": 3}  # and the lowest ZeRO stage for each
# What a key requires of the model.
_ABILITIES = {
    "freeze_positions": Ability.FREEZE_POSITIONS,
    "progressive": Ability.LAYER_BY_LAYER,
    "masked_only": Ability.MASKED_ONLY,
    "checkpoint_activations": Ability.CHECKPOINT,
    "compile": Ability.COMPILE,
}
TRANSFERS = ("progressive", "intermediate", "task_first")
_FOR_TRAINING = (
    "objective", "optimizer", "average", "schedule", "loss_scale", "gradient_clipping",
    "clip_each_parameter", "guard", "dropout", "checkpoint_activations", "stacking",
    "freeze_positions", "encoder", *TRANSFERS,
)  # fmt: skip


@dataclass
class LearnerConfig(Section):
    """A model, and how it is trained."""

    model: ModelConfig = field(default_factory=default_model)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    progressive: ProgressiveConfig | None = None
    intermediate: IntermediateConfig | None = None
    task_first: TaskFirstConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=optimizer_config)
    average: AverageConfig | None = None
    schedule: ScheduleConfig = field(default_factory=schedule_config)
    start: StartConfig = field(default_factory=StartConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    init: InitConfig = field(default_factory=InitConfig)
    view: Annotated[
        str,
        NOT_EMPTY,
        "The form in which the learner reads an example, if its task has several. "
        "sentence_pair has `first` and `second`; translation has `masked` and "
        "`every_token`, for models without a decoder. default: the whole example.",
    ] = DEFAULT_VIEW
    generator: Annotated[
        str | None,
        NOT_EMPTY,
        "The learner whose samples replace the masked tokens in this learner's text, so "
        "that `rtd` can detect them (ELECTRA): `teacher`, or the name of a student. null: "
        "this learner reads the masked text.",
    ] = None
    tokenizer: Annotated[
        str | None,
        PATH,
        NOT_EMPTY,
        "The folder of the learner's own tokenizer. A corpus of text must be built with "
        "`--also` that folder. null: the job's tokenizer.",
    ] = None
    embedding_sharing: Annotated[
        str,
        OneOf(SEPARATE, DISENTANGLED),
        "The word embedding of a learner with a `generator`. disentangled: the generator's "
        "embedding, without gradient, plus a table of its own that begins at zero "
        "(DeBERTaV3, arXiv 2111.09543, section 3.2).",
    ] = SEPARATE
    masked_only: Annotated[
        bool,
        "The teacher's last layer computes only the masked positions. If a task reads only "
        "the first tokens, it computes only these. This saves 5% of BERT-base's computing, and 12% "
        "of a model of 4 layers. Students can then learn only from the teacher's predictions at "
        "these positions. A student's last layer does this automatically.",
    ] = False
    stacking: StackingConfig = field(default_factory=StackingConfig)
    frozen: Annotated[bool, "The teacher is not trained (offline distillation)."] = False
    stored: Annotated[
        StoredConfig | None,
        "A frozen teacher's predictions are read from here in each step, and the teacher does "
        "not run. It still runs for held-out scores.",
    ] = None
    freeze_positions: Annotated[bool, "Do not train the position embeddings (DistilBERT)."] = False
    encoder: Annotated[
        str,
        OneOf("trained", "frozen"),
        "frozen: train only the heads; embeddings and layers keep their initial weights, and "
        "have no dropout.",
    ] = "trained"
    zero_stage: Annotated[
        int, OneOf(0, 1, 2, 3), "DeepSpeed's ZeRO stage, which decides what the ranks partition."
    ] = 0
    offload: Annotated[
        str,
        OneOf(*OFFLOADS),
        "What is kept in host memory. optimizer: the optimizer states; parameters: "
        "parameters and optimizer states.",
    ] = "none"
    precision: Annotated[
        str,
        OneOf(*PRECISIONS),
        "The precision of matrix products. bf16 and fp16: by autocast, on float32 weights. "
        "bf16_weights: weights and the states between layers are bfloat16 too, and the "
        "optimizer has float32 masters of the weights, as in DeepSpeed's and Megatron's bf16 "
        "and torchtitan's param_dtype. fp8: as bf16_weights, and the linear layers of the "
        "encoder multiply in 8 bits. Gradients are summed, losses computed and optimizer "
        "states kept in float32.",
    ] = "fp32"
    communication: Annotated[
        str,
        OneOf(*COMMUNICATIONS),
        "The precision in which ranks exchange gradients and, at stage 3, the parameters "
        "of the layers that are computed next. bf16 halves the bytes. Each rank's gradient "
        "is then rounded before it is summed, so results depend on the number of ranks.",
    ] = "fp32"
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    gradient_clipping: Annotated[
        float, WEIGHT, "The largest L2 norm of the gradient; 0: no clipping."
    ] = 1.0
    clip_each_parameter: Annotated[
        bool,
        "Clip the gradient of each parameter by its own norm, as the Adam of BERT's "
        "PyTorch code does (TinyBERT, PKD); false: by the norm of the whole gradient.",
    ] = False
    guard: GuardConfig = field(default_factory=GuardConfig)
    dropout: Annotated[
        float,
        PROBABILITY,
        "Hidden and attention dropout in this training; exports keep the rate of the "
        "model's config. A frozen teacher with dropout runs in training mode, as "
        "TinyBERT's does.",
    ] = 0.0
    checkpoint_activations: Annotated[
        bool, "Store only each layer's input, and recompute the rest in the backward pass."
    ] = False
    compile: Annotated[
        bool | None,
        "Compile layers and losses with torch.compile; not at ZeRO stage 3. null: on GPUs, "
        "where the model can, and Triton, a C compiler and Python's headers are installed.",
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        yield from self._conflicts_with_zero()
        if self.clip_each_parameter and not self.gradient_clipping:
            yield "clip_each_parameter", "needs gradient_clipping above 0"
        if self.frozen:
            yield from self._conflicts_with_frozen()
        if not self.model.is_trainable:
            yield from self._conflicts_with_untrainable()
        if self.init.layers is not None and len(self.init.layers) != self.model.layers:
            listed = len(self.init.layers)
            yield "init.layers", f"lists {listed} for the model's {self.model.layers} layers"
        if self.stored is not None:
            refusals = self.stored.conflicts_with_teacher(self.model, self.frozen)
            yield from within("stored", refusals)
        if self.precision == "fp8" and (why := self.model.cannot(Ability.FLOAT8)):
            yield "precision", self._naming_folder(why)
        for key, ability in _ABILITIES.items():
            if getattr(self, key) and (why := self.model.cannot(ability)):
                yield key, self._naming_folder(why)
        yield from self._conflicts_with_generator()
        yield from self._conflicts_with_sharing()
        yield from self._conflicts_with_transfer()
        yield from self.stacking.conflicts_with(self.model)
        if self.stacking.steps and (self.init.weights or self.init.tile):
            yield "stacking", "begins with random weights; remove it, or init.pretrained and tile"
        for key, why in self.objective.unequippable(self.model):
            yield f"objective.{key}", self._naming_folder(why)
        for name, term in self.objective.terms().items() if self.encoder == "frozen" else ():
            if term.compares in (STATES, LAYERS) and term.head is None:
                yield f"objective.{name}", "compares states, and encoder is frozen; remove it"

    @property
    def generator_name(self) -> str | None:
        """The full name of its `generator`."""
        return None if self.generator is None else learner_key(self.generator)

    @property
    def rounds_weights(self) -> bool:
        """Whether its weights are bfloat16, and their masters float32."""
        return self.precision in BF16_WEIGHTS

    @property
    def form(self) -> str:
        """The name, among a batch's views, of the form in which it reads an example."""
        return self.view if self.tokenizer is None else f"{self.view} by {self.tokenizer}"

    def waits_for(self, teacher: LearnerConfig) -> bool:
        """Whether a student's terms count only once its teacher is ahead (``min_lead``)."""
        is_measured = self.predicts_tokens_of(teacher) and not self.transfers
        return is_measured and self.objective.waits_for(teacher.objective)

    def predicts_tokens_of(self, teacher: LearnerConfig) -> bool:
        """Whether losses over tokens can be compared: those of another tokenizer are others."""
        return self.tokenizer == teacher.tokenizer or not self.architecture.mlm_head

    def finished(self, is_compared: bool = False) -> LearnerConfig:
        """The config of a teacher whose budget is used up: a frozen one with its float32 weights.

        One that `is_compared` with its students (``min_lead``) still computes its terms.
        """
        names = (declared.name for declared in dataclasses.fields(LearnerConfig))
        kept = {name: getattr(self, name) for name in names if name not in _FOR_TRAINING}
        changed: dict[str, Any] = {
            "model": self.architecture,
            "frozen": True,
            "precision": "bf16" if self.rounds_weights else self.precision,
            "budget": BudgetConfig(),
            "zero_stage": 3 if self.zero_stage == 3 else 0,
            "offload": "parameters" if self.offload == "parameters" else "none",
        }
        if is_compared:
            without_peer: dict[str, Any] = {"from_student": None}
            changed["objective"] = dataclasses.replace(self.objective, **without_peer)
        return _FinishedConfig(**(kept | changed))

    def at_rest(self) -> LearnerConfig:
        """The config of a teacher that runs in no step: its weights wait in host memory.

        Those of a model that translates stay whole, for its held-out scores.
        """
        if Ability.GENERATE in self.model.abilities:
            return dataclasses.replace(self, zero_stage=0, offload="none", compile=False)
        return dataclasses.replace(self, zero_stage=3, offload="parameters", compile=False)

    @property
    def in_training_mode(self) -> bool:
        """Whether it has dropout in a step: it is trained, or a frozen teacher with dropout."""
        return not self.frozen or self.dropout > 0

    @property
    def architecture(self) -> ModelConfig:
        """The `model` with the heads that its objective trains: what is built, and exported."""
        return self.objective.equip(self.model)

    def metrics_among(self, learners: Iterable[LearnerConfig]) -> Metrics:
        """The metrics of the learner's heads: those of its tasks, or those of the heads themselves.

        A frozen teacher has no objective. The metrics of its task head come from the one of
        `learners`, which are all of its job, whose objective has the task.
        """
        terms = (task for learner in learners for task in learner.objective.task_terms().values())
        tasks = {task.head: task.metrics_in(self.view) for task in terms}
        return metrics_of(self.architecture, tasks)

    def in_steps(self, steps: int) -> LearnerConfig:
        """This config with start, budget and `transfers` told in steps, in a job of `steps`."""
        told: dict[str, Any] = {
            key: section.in_steps(steps) for key, section in self.transfers.items()
        }
        told |= {"start": self.start.in_steps(steps), "budget": self.budget.in_steps(steps)}
        return dataclasses.replace(self, **told)

    def with_patience(self, patience: int | None) -> LearnerConfig:
        """This config with a patience, where its budget has none."""
        if patience is None or self.budget.patience is not None:
            return self
        return dataclasses.replace(self, budget=dataclasses.replace(self.budget, patience=patience))

    @property
    def transfers(self) -> dict[str, StagesConfig]:
        """The sections about what it learns before everything else, by key: one at most."""
        sections = {key: getattr(self, key) for key in TRANSFERS}
        return {key: section for key, section in sections.items() if section is not None}

    @property
    def stages(self) -> Stages:
        """Its stages: what is trained, by which terms and for how long."""
        sections = iter(self.transfers.values())
        return next((section.build(self.model.layers) for section in sections), Stages())

    def with_layers(self, layers: int) -> LearnerConfig:
        """This config with a model that has, and keeps, this many layers."""
        if layers == self.model.layers and not self.stacking.steps:
            return self
        model = self.model.with_layers(layers)
        return dataclasses.replace(self, model=model, stacking=StackingConfig())

    def _naming_folder(self, why: str) -> str:
        """A refusal, with the folder of the model where no key of the config describes it."""
        folder = self.init.pretrained
        return why if folder is None else f"{why}; init.pretrained is {folder}"

    def _conflicts_with_zero(self) -> Iterator[Refusal]:
        """Conflicts that DeepSpeed would report later, or less clearly."""
        if self.compile and self.zero_stage == 3:
            yield "compile", "must be false at zero_stage 3, which cuts layers into pieces"
        if self.zero_stage == 3 and Ability.GENERATE in self.model.abilities:
            # Every use of a layer is a collective there, and a search ends with its last text.
            yield "zero_stage", "must be 2 or less for a model that translates: ranks search alone"
        if self.zero_stage < OFFLOADS[self.offload]:
            yield "offload", f"{self.offload} needs zero_stage {OFFLOADS[self.offload]} or higher"

    def _conflicts_with_generator(self) -> Iterator[Refusal]:
        """A discriminator reads samples, and only it can tell them from the text."""
        if self.generator is None:
            if self.objective.rtd is not None:
                why = "detects the samples of a generator; name it in the learner's generator"
                yield "objective.rtd", why
            return
        for key in self.changed("view", "stored"):
            yield key, "is for a learner that reads no samples; remove it, or generator"

    def _conflicts_with_sharing(self) -> Iterator[Refusal]:
        """Settings that need a word embedding of the learner's own."""
        if self.embedding_sharing == SEPARATE:
            return
        key = "embedding_sharing"
        if self.generator is None:
            yield key, "is with a generator; name one, or remove it"
        if why := self.model.cannot(Ability.SHARE_EMBEDDING):
            yield key, why
        if self.architecture.mlm_head:
            yield key, "is for a learner that predicts no tokens; remove it, or mlm"
        copied = ("pretrained", "tile", "word_vectors", "teacher_layers", "teacher_embeddings")
        others = [f"init.{origin}" for origin in self.init.changed(*copied)]
        for other in (*others, *self.changed("average")):
            yield other, f"needs an embedding of the learner's own; remove it, or {key}"

    def _conflicts_with_transfer(self) -> Iterator[Refusal]:
        """A transfer is by terms of its own, which others follow."""
        for key in [*self.transfers][1:]:
            yield key, f"set either this or {next(iter(self.transfers))}"
        terms = self.objective.terms().values()
        for key, section in self.transfers.items():
            if {term.compares in section.first for term in terms} != {True, False}:
                yield key, f"objective must have {section.needs}"
        if self.task_first is not None and len(self.objective.tasks or ()) > 1:
            yield "task_first", "is for one task; objective.tasks has several"

    def _conflicts_with_frozen(self) -> Iterator[Refusal]:
        """Conflicts of a frozen learner, which has only a model and a source of its weights."""
        if self.init.pretrained is None:
            yield "init.pretrained", "must be set if frozen is true"
        if self.zero_stage not in FROZEN_STAGES:
            stages = " or ".join(map(str, FROZEN_STAGES))
            why = f"must be {stages} where frozen is true; the others partition what training needs"
            yield "zero_stage", why
        if self.offload == "optimizer":
            yield "offload", "must be none or parameters if frozen is true"
        for key in self.changed(*_FOR_TRAINING):
            if key != "dropout":
                yield key, "is for training; remove it (null), or frozen"
        if self.dropout and self.stored is not None:
            yield (
                "dropout",
                "must be 0 where predictions are stored: each is the same at every step",
            )

    def _conflicts_with_untrainable(self) -> Iterator[Refusal]:
        """Conflicts of a learner whose model can only be read."""
        if not self.frozen:
            why = "is for a frozen teacher; a model that is trained is of another kind"
            yield "model.kind", self._naming_folder(f"{self.model.kind} {why}")
        if self.dropout:
            yield "dropout", f"must be 0: a model of kind {self.model.kind} is only read"


class _FinishedConfig(LearnerConfig):
    """The config of a learner that this job has trained: it has weights, whatever its `init`."""

    def _conflicts_with_frozen(self) -> Iterator[Refusal]:
        yield from ()
