"""Initial weights that are not random: from a folder, or from the teacher."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline import MASKED, PAIRS, DataError
from data_pipeline.augmentation.word_vectors import token_vectors
from model import (
    Model,
    ModelConfig,
    ModelError,
    TaskHeadConfig,
    cannot_tile,
    first_weights,
    from_pretrained,
    select_layers,
    tile,
    with_fitting_heads,
)
from trainer.checkpoint.layout import full_state_dict
from trainer.errors import TrainingError
from trainer.learner_life import InitConfig
from trainer.learners.learner import Learner
from trainer.learners.module import WORD_EMBEDDING
from trainer.task_facts import FILE

# Parameters of a learner's module that belong to the model, not to its objective.
MODEL_PREFIX = "model."
_TASKS = "task_heads."
LABELS_SHOWN = 5
_log = logging.getLogger(__name__)


def from_folder(
    section: str, init: InitConfig, config: ModelConfig, is_frozen: bool = False
) -> Mapping[str, Tensor]:
    """The weights in the folder of `init` with which a model of `config` begins.

    A task's head that another program has trained is kept if it fits a task of `config`. The head
    of a frozen learner is kept under the name that `config` has for it. A line is printed if the
    head does not fit, if the labels of the task's own head have changed, or if labels without names
    are taken to be the examples' labels.
    """
    assert init.weights is not None
    model = from_pretrained(Path(init.weights), config.kind)
    given, state = _with_labels(section, init, model.config), dict(model.state_dict())
    source = given
    if init.layers is not None:
        state = dict(_selected(f"{section}.init.layers", state, init.layers, source))
    if init.heads == "new":
        state = {name: tensor for name, tensor in state.items() if not name.startswith(_TASKS)}
        return first_weights(config, source, state)
    is_ours = (Path(init.weights) / FILE).exists()
    source, state = with_fitting_heads(config, source, state, renames=is_frozen or not is_ours)
    if dist.get_rank() == 0:
        _say_unnamed(section, init.weights, given, source)
        for name, head in source.task_heads.items():
            if config.task_heads.get(name) != head and (name in config.task_heads or not is_ours):
                _say_new_head(init.weights, head, config)
    return first_weights(config, source, state)


def from_smaller(section: str, folder: str, config: ModelConfig, seed: int) -> Mapping[str, Tensor]:
    """The weights of a model of `config`, tiled from the smaller model in a folder."""
    model = from_pretrained(Path(folder))
    if why := cannot_tile(config, model.config):
        raise TrainingError(f"{section}.init.tile: {folder}: {why}")
    return tile(model.state_dict(), model.config, config, seed)


def _with_labels(section: str, init: InitConfig, config: ModelConfig) -> ModelConfig:
    """The model with the labels that `init` names, in the head that has labels."""
    if init.labels is None:
        return config
    heads = {name: head for name, head in config.task_heads.items() if head.labels}
    if [len(head.labels) for head in heads.values()] != [len(init.labels)]:
        counts = " and ".join(str(len(head.labels)) for head in heads.values()) or "no"
        raise TrainingError(
            f"{section}.init.labels: lists {len(init.labels)} for the {counts} labels of the head "
            f"in {init.pretrained}"
        )
    named = {name: replace(head, labels=init.labels) for name, head in heads.items()}
    return replace(config, task_heads={**config.task_heads, **named})


def _say_unnamed(section: str, folder: str, given: ModelConfig, fitted: ModelConfig) -> None:
    unnamed = [head for head in given.task_heads.values() if head.is_unnamed]
    for head in fitted.task_heads.values():
        if unnamed and head not in given.task_heads.values():
            _log.warning(
                "%s: the labels of its head have no names: %s are %s; %s.init.labels names others",
                *(folder, _shown(unnamed[0].labels), _shown(head.labels), section),
            )


def _say_new_head(folder: str, theirs: TaskHeadConfig, config: ModelConfig) -> None:
    wanted = "; ".join(f"{name}: {_described(head)}" for name, head in config.task_heads.items())
    if wanted:
        _log.warning(
            "%s: its head (%s) does not fit the task (%s), which begins with a new one",
            *(folder, _described(theirs), wanted),
        )


def _described(head: TaskHeadConfig) -> str:
    """The kind of a head, its first labels, and the numbers that it reads."""
    beside = f" beside the numbers {_shown(head.numbers)}" if head.numbers else ""
    return (f"{head.kind} of {_shown(head.labels)}" if head.labels else head.kind) + beside


def _shown(labels: Sequence[str]) -> str:
    return ", ".join([*labels[:LABELS_SHOWN], *["..."] * (len(labels) > LABELS_SHOWN)])


def from_word_vectors(file: str, tokenizer_dir: Path, model: Model) -> Mapping[str, Tensor]:
    """The word embedding of a `model`, with the vectors in `file` for the tokens that it has."""
    vectors = token_vectors(Path(file), tokenizer_dir)
    if not vectors:
        raise DataError(f"{file}: has no word of the tokenizer in {tokenizer_dir}")
    embedding = model.state_dict()[WORD_EMBEDDING].clone()
    for token, vector in vectors.items():
        embedding[token] = torch.from_numpy(vector)
    return {WORD_EMBEDDING: embedding}


def from_layers(section: str, teacher: Learner, layers: Sequence[int]) -> Mapping[str, Tensor]:
    """The teacher's current weights, with these of its layers only. Collective."""
    state = model_state(full_state_dict(teacher.engine))
    key = f"{section}.init.teacher_layers"
    return _selected(key, state, layers, teacher.config.architecture)


def _selected(
    key: str, state: Mapping[str, Tensor], layers: Sequence[int], config: ModelConfig
) -> Mapping[str, Tensor]:
    """The weights of these layers (`select_layers`); a TrainingError names the `key`."""
    try:
        return select_layers(state, layers, config)
    except ModelError as error:
        raise TrainingError(f"{key}: {error}") from error


def from_embeddings(teacher: Learner, config: ModelConfig) -> Mapping[str, Tensor]:
    """The teacher's current embeddings and heads, without its layers. Collective.

    MobileBERT's code initialises a student in this way. If the student uses another kind of norm,
    the norm of the embeddings is left out; the norm in the head is a layer norm in every model.
    """
    same_norm = config.has_same_norm(teacher.config.model)
    left_out = "encoder." if same_norm else ("encoder.", "embeddings.norm.")
    return {
        name: tensor
        for name, tensor in model_state(full_state_dict(teacher.engine)).items()
        if not name.startswith(left_out)
    }


def heads_in(weights: Mapping[str, Tensor], expected: Iterable[str] = ()) -> list[str]:
    """The names of the heads that `weights` contains, with all of the `expected` parameters."""
    missing = {_head_of(name) for name in expected if name not in weights}
    parts = {_head_of(name) for name in weights} - missing
    tasks = sorted(part.removeprefix(_TASKS) for part in parts if part.startswith(_TASKS))
    mlm, pairs = [MASKED] * ("head" in parts), [PAIRS] * ("pair_head" in parts)
    return [*mlm, *pairs, *tasks]


def heads_without_weights(model: Model) -> list[str]:
    """The task heads that only pool states, and so need no training."""
    return [name for name, head in model.task_heads.items() if not head.state_dict()]


def _head_of(name: str) -> str:
    """The part of a model that a parameter belongs to; a task's head by its name."""
    part, task = name.split(".")[:2]
    return f"{_TASKS}{task}" if f"{part}." == _TASKS else part


def model_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's part of a learner's `state`, under the model's own parameter names."""
    return {
        name.removeprefix(MODEL_PREFIX): tensor
        for name, tensor in state.items()
        if name.startswith(MODEL_PREFIX)
    }
