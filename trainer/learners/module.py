"""The module inside a learner's engine, model and objective in one, built and compiled."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from model import READ_OUT, Ability, Capture, Model, ModelConfig, ModelShape, build, float8
from trainer.batches import MicroBatch
from trainer.errors import TrainingError
from trainer.fusion import Options, fusing
from trainer.learner_config import DISENTANGLED, LearnerConfig
from trainer.learner_names import derive, is_teacher, section_of
from trainer.learners.programs import Program, Result
from trainer.objectives import Objective

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11 on

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
    others: Mapping[str, ModelConfig] | None = None,
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


def require_products(name: str, config: LearnerConfig) -> None:
    """Raise TrainingError, naming the key, where the GPU cannot multiply in its `precision`."""
    if config.precision != "fp8" or not torch.cuda.is_available():
        return
    if (capability := torch.cuda.get_device_capability()) < float8.LEAST_CAPABILITY:
        least, has = (".".join(map(str, it)) for it in (float8.LEAST_CAPABILITY, capability))
        raise TrainingError(
            f"{section_of(name)}.precision: fp8 needs a GPU of compute capability {least} or "
            f"higher, and {torch.cuda.get_device_name()} has {has}; use bf16_weights"
        )


def is_compiled(config: LearnerConfig, device: torch.device) -> bool:
    """Whether `compile` asks for it; by default on a GPU, where the model and the machine allow."""
    if config.compile is not None:
        return config.compile
    allows = config.zero_stage < 3 and not config.model.cannot(Ability.COMPILE)
    return device.type == "cuda" and allows and has_generator(device)


def has_generator(device: torch.device) -> bool:
    """Whether Triton serves this GPU; it needs a C compiler for what launches its kernels."""
    compilers = os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang")
    has_triton = find_spec("triton") is not None and any(compilers)
    return has_triton and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
