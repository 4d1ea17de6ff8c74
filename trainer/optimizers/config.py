"""The `optimizer` section of a learner, its groups of parameters, and the door of optimizers.

Its `average` section asks for a second set of weights, the mean of those that it had. The mean is a
state of each parameter beside the optimizer's own: ZeRO cuts it, and checkpoints store it, as they
do those.

An optimizer is a module of `trainer.optimizers.kinds`, or a file of `plugins:`, with a config that
`register_optimizer` decorates. Nothing else names it: checkpoints store the states that it keeps,
and the planner counts them.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from configs.kinds import add_kind, chosen
from configs.rules import PROBABILITY, Length, OneOf, Range, positive
from configs.section import Section

MATRICES, EMBEDDINGS, BIASES, NORMS = PARTS = ("matrices", "embeddings", "biases", "norms")
KIND = (
    "The optimizer. A run may resume with another one; if its states are different, they begin "
    "fresh."
)
_Config = TypeVar("_Config", bound="type[OptimizerConfig]")


@dataclass
class OptimizerConfig(Section, ABC):
    """The optimizer of a learner: `kind` names it, and decides what other keys there are."""

    # The tensors that it keeps for a parameter, each shaped like it. Single numbers need no name.
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    kind: Annotated[str, KIND] = "adamw"
    learning_rate: Annotated[
        float, positive(1e6), "The peak learning rate, which `schedule` scales."
    ] = 1e-4
    weight_decay: Annotated[
        float, Range(0, 100), "Decoupled weight decay, times the learning rate."
    ] = 0.01
    no_decay: Annotated[
        list[str],
        OneOf(*PARTS),
        "Parameters without weight decay. norms are all vectors that are not biases.",
    ] = field(default_factory=lambda: [BIASES, NORMS])

    @abstractmethod
    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of these groups (`parameter_groups`).

        Without `torch.optim.Optimizer.state` of a parameter it begins anew. Under ZeRO a parameter
        is a flat tensor, which holds parts of many; a `Tensorwise` optimizer is told which.
        """

    def settings(self, name: str, part: str) -> dict[str, Any]:
        """The settings of the group of a parameter, which is one of the `PARTS` of the model.

        adaptive: whether it is a matrix; states: the names of its states.
        """
        return {
            "weight_decay": 0.0 if part in self.no_decay else self.weight_decay,
            "adaptive": part in (MATRICES, EMBEDDINGS),
            "states": self.states,
        }


@dataclass
class AdamConfig(OptimizerConfig):
    """Keys of the optimizers with Adam's two moments."""

    betas: Annotated[
        list[float], Length(2), PROBABILITY, "Decay rates of the first and second moment, per step."
    ] = field(default_factory=lambda: [0.9, 0.999])
    epsilon: Annotated[float, positive(1.0), "Added to the square root of the second moment."] = (
        1e-8
    )

    @property
    def moments(self) -> tuple[tuple[float, float], float]:
        """The betas and the epsilon."""
        return (self.betas[0], self.betas[1]), self.epsilon


def register_optimizer(config: _Config) -> _Config:
    """A decorator: `optimizer.kind` may be this config's.

    Raises TypeError as `configs.kinds.require_new`.
    """
    return add_kind(OptimizerConfig, config)


def optimizer_config(kind: str = "adamw", **settings: Any) -> OptimizerConfig:
    """The section of this kind of optimizer, with these keys."""
    return chosen(OptimizerConfig, {"kind": kind})(**settings)


class Rates(Protocol):
    """Factors on the scheduled learning rate, by group of parameters.

    These are pure functions, so that a resumed learner continues exactly. A group whose factor is 0
    is frozen: no update, no decay, and its moments do not advance.
    """

    def group(self, parameter: str) -> str:
        """The group of a parameter, given by its name in the learner's module."""

    def factor(self, group: str, step: int) -> float:
        """The factor on a group's learning rate at the learner's `step`, which counts from 0."""


def parameter_groups(
    module: nn.Module, config: OptimizerConfig, rates: Rates
) -> list[dict[str, Any]]:
    """The trained parameters, grouped by `rates.group` and by the optimizer's `settings`.

    As in BERT's and LAMB's original code, biases and norm parameters (one dimension) do not decay
    unless the config says so and, under LAMB, get no trust ratio. A parameter named `table` is an
    embedding, as those of `nn.Embedding` are. Keys of a group: params, name, and those of the
    settings.
    """
    tables = {
        id(parameter)
        for child in module.modules()
        for name, parameter in child.named_parameters(recurse=False)
        if isinstance(child, nn.Embedding) or name == "table"
    }
    groups: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            settings = config.settings(name, _part(name, parameter, id(parameter) in tables))
            groups.setdefault((rates.group(name), *settings.items()), []).append(parameter)
    return [
        {"params": parameters, "name": name, **dict(settings)}
        for (name, *settings), parameters in groups.items()
    ]


def _part(name: str, parameter: nn.Parameter, is_table: bool) -> str:
    """The part of the model (`PARTS`) that a parameter belongs to."""
    if parameter.ndim >= 2:
        return EMBEDDINGS if is_table else MATRICES
    return BIASES if name.rpartition(".")[2].startswith("bias") else NORMS


AVERAGE_KIND = "Which weights are averaged."


@dataclass
class AverageConfig(Section, ABC):
    """A mean of a learner's weights, scored and exported beside the weights themselves."""

    kind: Annotated[str, AVERAGE_KIND] = "ema"

    @property
    def window(self) -> int:
        """How many checkpoints it is the mean of; 0: it follows every step."""
        return 0

    @abstractmethod
    def kept(self, steps: int) -> float:
        """The part of the mean that stays in the step after this many; 1: all of it."""


@dataclass
class ExponentialAverage(AverageConfig):
    """The exponential moving average of the weights after each step (Polyak and Juditsky, 1992).

    ``mean = decay * mean + (1 - decay) * weights``. After t steps the decay is at most
    (1 + t) / (10 + t), as in TensorFlow's ExponentialMovingAverage and diffusers' EMAModel, so that
    the weights of the start are soon forgotten.
    """

    kind: Annotated[str, OneOf("ema"), AVERAGE_KIND] = "ema"
    decay: Annotated[
        float, PROBABILITY, "The largest fraction of the mean that is kept in a step."
    ] = 0.999

    def kept(self, steps: int) -> float:
        return min(self.decay, (1 + steps) / (10 + steps))


@dataclass
class CheckpointAverage(AverageConfig):
    """The mean of the last checkpoints (Vaswani et al., arXiv 1706.03762, section 6.1; LAWA, arXiv
    2209.14981): those at multiples of `checkpoint.every`, and the one at the learner's end.
    """

    kind: Annotated[str, OneOf("last"), AVERAGE_KIND] = "last"
    checkpoints: Annotated[
        int,
        Range(2, 1000),
        "How many of the last checkpoints are averaged; the run keeps them for this.",
    ] = 5

    @property
    def window(self) -> int:
        return self.checkpoints

    def kept(self, steps: int) -> float:
        return 1.0


for _kind in (ExponentialAverage, CheckpointAverage):
    add_kind(AverageConfig, _kind)
