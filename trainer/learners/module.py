"""The module inside a learner's engine, model and objective in one, and its programs.

ZeRO-3 gathers a parameter when its module is entered through the engine, so everything that reads
weights runs as a program.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from model import READ_OUT, Ability, Capture, Features, Model, ModelConfig, ModelShape, build
from model.precision import try_float8
from model.protocol import NOTHING
from trainer.batches import MicroBatch
from trainer.denominators import Totals
from trainer.errors import TrainingError
from trainer.fusion import Options, fusing
from trainer.learner_config import DISENTANGLED, LearnerConfig
from trainer.learner_names import OWN, derive, is_teacher, section_of
from trainer.objectives import LossInputs, Objective
from trainer.objectives.term import ExampleLosses, Term
from trainer.scoring.metric import Metric
from trainer.scoring.scores import NO_TEACHERS, ScoreInputs, TeacherHeads, capture_for
from trainer.teacher_outputs import OutputProjection, TeacherOutputs, detach

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11 on

Result = TypeVar("Result", covariant=True)


class Program(Protocol[Result]):
    """A computation in an engine's forward pass."""

    def __call__(self, model: Model, objective: Objective, batch: MicroBatch) -> Result:
        """The program's result on `batch`, computed under the learner's autocast."""


@dataclass(frozen=True)
class Train:
    """Returns the loss share (a scalar to run backward), the term shares [terms], the features.

    totals: the denominators of the global batch; sources: the outputs of other learners, by name;
    capture: what the features must hold; step: the learner's own step, on which the objective
    depends; whole_batch, views: as in `LossInputs`.
    """

    totals: Totals
    sources: Mapping[str, TeacherOutputs]
    capture: Capture = NOTHING
    step: int = 0
    whole_batch: Mapping[Term, ExampleLosses] = field(default_factory=dict)
    views: Mapping[str, MicroBatch] = field(default_factory=dict)

    def __call__(
        self, model: Model, objective: Objective, batch: MicroBatch
    ) -> tuple[Tensor, Tensor, Features]:
        features = features_of(model, batch, self.capture)
        projection = own_projection(model, features)
        sources = dict(self.sources)
        if OWN in objective.sources:
            sources[OWN] = detach(features, projection)
        read = batch, features, projection, sources, self.step, self.whole_batch, self.views
        inputs = LossInputs(*read)
        loss, shares = objective(inputs, self.totals)
        return loss, shares, features


@dataclass(frozen=True)
class Score:
    """Returns what each of `metrics` reads from the batch (`trainer.scoring`).

    teachers: as in `ScoreInputs`.
    """

    metrics: Sequence[Metric[ScoreInputs]]
    teachers: TeacherHeads = field(default_factory=dict)

    def __call__(self, model: Model, objective: Objective, batch: MicroBatch) -> tuple[Tensor, ...]:
        return score(model, batch, self.metrics, self.teachers)


@dataclass(frozen=True)
class Predict:
    """Returns the features alone, with what `capture` asks for."""

    capture: Capture = NOTHING

    def __call__(self, model: Model, objective: Objective, batch: MicroBatch) -> Features:
        return features_of(model, batch, self.capture)


def score(
    model: Model,
    batch: MicroBatch,
    metrics: Sequence[Metric[ScoreInputs]],
    teachers: TeacherHeads = NO_TEACHERS,
) -> tuple[Tensor, ...]:
    """Run `model` on a micro-batch; returns what each metric reads from the result.

    Only heads for which the batch has labels run. `teachers` are as in `ScoreInputs`.
    """
    heads = {metric.head for metric in metrics if _has_labels(batch, metric.head)}
    capture = capture_for(metric for metric in metrics if metric.head in heads)
    features = features_of(model, batch, capture)
    inputs = ScoreInputs(features, own_projection(model, features), batch, model, teachers)
    return tuple(
        metric.of_batch(inputs) if metric.head in heads else metric.empty(batch.input_ids.device)
        for metric in metrics
    )


def compared_heads(
    metrics: Iterable[Metric[ScoreInputs]], batch: MicroBatch
) -> dict[str, tuple[str, ...]]:
    """The heads of other learners with which metrics compare this batch, by learner."""
    compared = [metric for metric in metrics if metric.compares and metric.head in batch.targets]
    sources = dict.fromkeys(metric.compares or "" for metric in compared)
    return {
        source: tuple(metric.head for metric in compared if metric.compares == source)
        for source in sources
    }


def _has_labels(batch: MicroBatch, head: str) -> bool:
    return any(name == head or name.startswith(f"{head}_") for name in batch.targets)


def own_projection(model: Model, features: Features) -> OutputProjection | None:
    """The model's vocabulary projection; None where `features` have no input for it."""
    has_words = features.vocabulary_input is not None
    return OutputProjection(*model.output_projection()) if has_words else None


def features_of(model: Model, batch: MicroBatch, capture: Capture) -> Features:
    """The model's features of a micro-batch, up to the vocabulary projection."""
    read = batch.input_ids, batch.segment_ids, batch.visible, batch.masked_positions
    return model.features(*read, capture, batch.numbers)


LEAST_CAPABILITY = (7, 0)  # of a GPU for which Triton generates kernels

WORD_EMBEDDING = "embeddings.word.weight"
AUTOCAST = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "bf16_weights": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


class LearnerModule(nn.Module):
    """Model and objective as one module, so that programs run inside the engine's forward pass.

    ZeRO-3 gathers parameters as modules are entered. The losses use the vocabulary projection,
    which shares its weight with the word embedding, so they must run inside this module.
    """

    def __init__(self, model: Model, objective: Objective, precision: str) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.precision = precision
        self.compile_options: Options | None = None  # None: nothing is compiled
        self._frozen: list[nn.Module] = []

    def freeze_encoder(self) -> None:
        """Train only the heads and the pooler; they read the features of evaluation mode.

        The features of BERT's feature-based approach are fixed: they have no dropout (arXiv
        1810.04805, section 5.3).
        """
        children = self.model.named_children()
        self._frozen = [part for name, part in children if f"{name}." not in READ_OUT]
        for part in self._frozen:
            part.requires_grad_(False)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for part in self._frozen:
            part.eval()
        return self

    def forward(self, program: Program[Result], batch: MicroBatch) -> Result:
        """Run `program` on a micro-batch in this learner's precision; returns its result."""
        with self.autocast(batch.input_ids.device):
            return program(self.model, self.objective, batch)

    def round_weights(self) -> dict[str, Tensor]:
        """Round the parameters to bfloat16, but not the buffers; returns them as they were."""
        exact = {name: parameter.data for name, parameter in self.named_parameters()}
        for parameter in self.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        return exact

    @contextlib.contextmanager
    def autocast(self, device: torch.device) -> Iterator[None]:
        """This learner's precision, and fused losses if it is compiled."""
        dtype = AUTOCAST[self.precision]
        with (
            torch.autocast(device.type, dtype, enabled=dtype is not None),
            fusing(self.compile_options),
        ):
            yield

    def compile_parts(self, dynamic: bool = False, **options: Any) -> None:
        """Run the layers and losses through ``torch.compile``, as in `Model.compile_layers`."""
        self.compile_options = {"dynamic": dynamic, **options}
        self.model.compile_layers(**self.compile_options)


def always_captured(name: str, config: LearnerConfig) -> Capture:
    """Captured on every teacher forward, so that rounding does not depend on the students."""
    return Capture(last_hidden_state=is_teacher(name) and not config.masked_only)


def build_module(
    name: str,
    config: LearnerConfig,
    teacher: ModelConfig,
    seed: int,
    weights: Mapping[str, Tensor] | None = None,
    others: Mapping[str, ModelConfig] | None = None,
) -> LearnerModule:
    """A learner's module, with `weights` or random ones as its initial weights.

    Its terms may read its `teacher`, or further teachers: `others`, by name.

    Random weights are a pure function of (seed, name), or only of `init.seed` if it is set. Raises
    TrainingError, naming the config's section, when the weights do not fit.
    """
    drawn = weights_seed(name, config, seed)
    module = assemble(name, config, teacher, seed, lambda model: build(model, drawn), others)
    if config.embedding_sharing == DISENTANGLED:
        nn.init.zeros_(module.model.get_parameter(WORD_EMBEDDING))
    if weights is not None:
        _load(module.model, weights, section_of(name), complete=not config.init.embeddings_only)
    return module


def weights_seed(name: str, config: LearnerConfig, seed: int) -> int:
    """The seed of a learner's random weights, in a job with this `seed`."""
    return derive(seed, name) if config.init.seed is None else derive(config.init.seed)


def assemble(
    name: str,
    config: LearnerConfig,
    teacher: ModelConfig,
    seed: int,
    make: Callable[[ModelConfig], Model],
    others: Mapping[str, ModelConfig] | None,
) -> LearnerModule:
    """A learner's module from its objective and the model that `make` returns."""
    objective = build_objective(config, teacher, derive(seed, name, "objective"), others)
    model = make(config.architecture.with_dropout(config.dropout))
    if config.precision == "fp8":
        model.use_float8()
    if config.checkpoint_activations:
        model.checkpoint_activations()
    module = LearnerModule(model, objective, config.precision).requires_grad_(not config.frozen)
    if config.freeze_positions:
        model.freeze_positions()
    if config.encoder == "frozen":
        module.freeze_encoder()
    return module


def build_objective(
    config: LearnerConfig,
    teacher: ModelShape,
    seed: int,
    others: Mapping[str, ModelShape] | None = None,
) -> Objective:
    """A learner's objective, beside its `teacher`'s model and those of `others`, by name.

    Raises ValueError if a term does not fit.
    """
    shapes, read_by = (config.model, teacher), _read_by(config)
    return Objective(config.objective, *shapes, seed, config.stages, others, read_by=read_by)


def _read_by(config: LearnerConfig) -> dict[str, frozenset[str]]:
    """Which tasks read a part of the model that not all of them read, by the part's prefix."""
    heads = config.architecture.task_heads
    pooled = frozenset(name for name, head in heads.items() if head.pooling == "pooler")
    parts = {f"model.task_heads.{name}.": frozenset([name]) for name in heads}
    parts["model.pooler."] = pooled
    return {part: names for part, names in parts.items() if 0 < len(names) < len(heads)}


def _load(model: Model, weights: Mapping[str, Tensor], section: str, *, complete: bool) -> None:
    """Load `weights` into the model. Weights that the model does not have are ignored.

    The pooler and the heads may be missing from `weights` and keep their initial values. With
    `complete`, anything else that is missing raises TrainingError.
    """
    try:
        missing_keys = model.load_state_dict(weights, strict=False).missing_keys
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise TrainingError(f"{section}.init: the weights do not fit: {reason}") from error
    missing = [name for name in missing_keys if not name.startswith(READ_OUT)]
    if missing and complete:
        raise TrainingError(f"{section}.init: there are no weights for {', '.join(missing[:3])}")


def require_products(name: str, config: LearnerConfig, device: torch.device) -> None:
    """Raise TrainingError, naming the key, where `device` cannot multiply in its `precision`."""
    if config.precision != "fp8":
        return
    try:
        try_float8(device)
    except RuntimeError as error:
        key, reason = f"{section_of(name)}.precision", str(error).splitlines()[0]
        raise TrainingError(
            f"{key}: fp8 cannot be computed here ({reason}); use bf16_weights"
        ) from error


def is_compiled(config: LearnerConfig, device: torch.device) -> bool:
    """Whether `compile` asks for it; by default on a GPU, where the model and the machine allow."""
    if config.compile is not None:
        return config.compile
    allows = config.zero_stage < 3 and not config.model.cannot(Ability.COMPILE)
    return device.type == "cuda" and allows and has_generator(device)


def has_generator(device: torch.device) -> bool:
    """Whether Triton serves this GPU.

    What launches its kernels is compiled here: it needs a C compiler, and the headers of Python,
    which Linux distributions leave out (python3-dev).
    """
    compilers = os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang")
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    has_triton = find_spec("triton") is not None and any(compilers) and headers.is_file()
    return has_triton and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
