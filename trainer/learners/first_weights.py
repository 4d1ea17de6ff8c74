"""Initial weights that are not random: from a folder, or from the teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from data_pipeline import MASKED, PAIRS
from model import ModelConfig, ModelError, from_pretrained, select_layers
from trainer.checkpoint import full_state_dict
from trainer.errors import TrainingError
from trainer.learners.learner import Learner

# Parameters of a learner's module that belong to the model, not to its objective.
MODEL_PREFIX = "model."


def from_folder(folder: str, config: ModelConfig) -> Mapping[str, Tensor]:
    """The weights in a Hugging Face `folder`, but for heads that the config has otherwise."""
    found = from_pretrained(Path(folder))
    others = [
        f"task_heads.{name}."
        for name, head in found.config.task_heads.items()
        if config.task_heads.get(name) != head  # of another task, or with other labels
    ]
    weights = found.state_dict()
    return {name: one for name, one in weights.items() if not name.startswith(tuple(others))}


def from_layers(section: str, teacher: Learner, layers: Sequence[int]) -> Mapping[str, Tensor]:
    """The teacher's current weights, with these of its layers only. Collective."""
    try:
        return select_layers(
            model_state(full_state_dict(teacher.engine)), layers, teacher.config.architecture
        )
    except ModelError as error:
        raise TrainingError(f"{section}.init.teacher_layers: {error}") from error


def from_embeddings(teacher: Learner, config: ModelConfig) -> Mapping[str, Tensor]:
    """The teacher's current embeddings and heads, without its layers. Collective.

    MobileBERT's code initialises a student this way. The norm of the embeddings is left out where
    the student uses another kind of norm; the norm in the head is a layer norm in every model.
    """
    same_norm = config.has_same_norm(teacher.config.model)
    left_out = "encoder." if same_norm else ("encoder.", "embeddings.norm.")
    return {
        name: tensor
        for name, tensor in model_state(full_state_dict(teacher.engine)).items()
        if not name.startswith(left_out)
    }


def heads_in(weights: Mapping[str, Tensor]) -> list[str]:
    """The names of the heads that `weights` contains."""
    parts = {tuple(name.split(".")[:2]) for name in weights}
    first = {part[0] for part in parts}
    tasks = sorted(part[1] for part in parts if part[0] == "task_heads")
    mlm, pairs = [MASKED] * ("head" in first), [PAIRS] * ("pair_head" in first)
    return [*mlm, *pairs, *tasks]


def model_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's part of a learner's `state`, under the model's own parameter names."""
    return {
        name.removeprefix(MODEL_PREFIX): tensor
        for name, tensor in state.items()
        if name.startswith(MODEL_PREFIX)
    }
