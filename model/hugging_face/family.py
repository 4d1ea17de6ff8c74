"""The description of one `transformers` architecture: how to read and write it."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model.config import EncoderConfig
from model.errors import ModelError
from model.hugging_face.task_heads import DETECTOR, HeadForm
from model.task_head_config import DETECTION

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

_AS_THEIRS = "a frozen teacher may have it with model: {kind: transformers}"

Keys = Mapping[str, tuple[str, Any]]  # our key -> the key of `transformers`, and its default
Rules = tuple[tuple[str, str], ...]
# Our names of the two halves of a layer, as patterns whose first group is its number from 0.
ATTENTION = r"encoder\.attention\.(\d+)"
STACK = r"encoder\.feed_forward\.(\d+)\.stack\.0"
# Both halves of a gated unit are one matrix here, and two in some classes of `transformers`.
BOTH_GATES = ".mlp.gate_up."
GATES = ".mlp.gate_proj.", ".mlp.up_proj."


class Inexpressible(ModelError):
    """The `transformers` class cannot express the configuration."""


def projection_rules(attention: str) -> Rules:
    """Rules for Llama's names of the projections of ``attention``, a replacement with the layer."""
    parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    return tuple(
        (ATTENTION + rf"\.{ours}\.(.+)", rf"{attention}.{theirs}.\2")
        for ours, theirs in parts.items()
    )


@dataclass(frozen=True)
class Family:
    """One architecture of `transformers`. "Their" names and keys are those of `transformers`.

    read: their config.json and tensor names -> keyword arguments of EncoderConfig.
    write: our configuration -> their config.json. Raises Inexpressible, naming what does not fit.
    rules: our configuration -> (pattern of our tensor name, replacement); the first full match
        applies.
    heads: the form of each kind of task head that the architecture has a class for.
    to_ours, to_theirs: convert tensors, by their names, to our layout and back.
    cut: before `to_ours`, converts tensors whose layout depends on their config.json.
    pair_class: the ending of the class for a model whose only head is the pair head.
    """

    model_type: str
    read: Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]]
    write: Callable[[EncoderConfig], dict[str, Any]]
    rules: Callable[[EncoderConfig], Rules]
    heads: Mapping[str, HeadForm] = field(default_factory=dict)
    to_ours: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    to_theirs: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    cut: Callable[[Mapping[str, Any], dict[str, Tensor]], dict[str, Tensor]] = lambda _, state: (
        state
    )
    pair_class: str = "Model"

    @property
    def forms(self) -> Mapping[str, HeadForm]:
        """The form of each kind of task head that can be written with the architecture."""
        return {DETECTION: DETECTOR, **self.heads}

    def their_names(self, config: EncoderConfig, names: Iterable[str]) -> dict[str, str]:
        """The `transformers` name of each of our tensors: our name -> their name."""
        rules = (*self._head_rules(config), *self.rules(config))
        return {name: self._translate(name, rules) for name in names}

    def _head_rules(self, config: EncoderConfig) -> Iterator[tuple[str, str]]:
        for name, head in config.task_heads.items():
            form = self.forms.get(head.kind)
            for pattern, replacement in () if form is None else form.rules:
                yield rf"task_heads\.{name}\.{pattern}", replacement

    def _translate(self, name: str, rules: Rules) -> str:
        for pattern, replacement in rules:
            match = re.fullmatch(pattern, name)
            if match is not None:
                return match.expand(replacement)
        raise Inexpressible(f"transformers' {self.model_type} has no place for {name}")


def read_activation(name: object, key: str) -> str:
    """Our name of the `transformers` activation at `key`. Raises ModelError if we have none."""
    if str(name) not in _ACTIVATIONS:
        raise ModelError(f"{key}: {name!r} is not one of {', '.join(_ACTIVATIONS)}; {_AS_THEIRS}")
    return _ACTIVATIONS[str(name)]


def write_activation(name: str) -> str:
    """The `transformers` name of one of our activations. Raises Inexpressible if it has none."""
    for theirs, ours in _ACTIVATIONS.items():
        if ours == name:
            return theirs
    raise Inexpressible(f"transformers has no activation {name!r}")


def read_keys(theirs: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """The values that a config.json has for our keys."""
    values = {ours: theirs.get(name, default) for ours, (name, default) in keys.items()}
    if "pad_token_id" in values and values["pad_token_id"] is None:
        values["pad_token_id"] = -1
    for key in ("activation", "head_activation"):
        if key in values:
            values[key] = read_activation(values[key], keys[key][0])
    return values


def write_keys(config: EncoderConfig, keys: Keys) -> dict[str, Any]:
    """The reverse of `read_keys`."""
    values = {ours: getattr(config, ours) for ours in keys}
    if values.get("pad_token_id", 0) < 0:
        values["pad_token_id"] = None
    if "activation" in values:
        values["activation"] = write_activation(config.activation)
    if "head_activation" in values:
        values["head_activation"] = write_activation(config.head_activation or config.activation)
    return {keys[ours][0]: value for ours, value in values.items()}


def refuse(theirs: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ModelError if a setting that changes the computation has an unsupported value."""
    for key, values in allowed.items():
        if key in theirs and theirs[key] not in values:
            raise ModelError(
                f"{key}: {theirs[key]!r} is not supported (only {values[0]!r}); {_AS_THEIRS}"
            )


def read_rope_theta(theirs: Mapping[str, Any], default: float) -> float:
    """The base of the rotary angles. Raises ModelError for angles that are scaled."""
    rope = theirs.get("rope_parameters") or {}
    refuse_scaled_rope(theirs, rope)
    return float(rope.get("rope_theta", theirs.get("rope_theta", default)))


def refuse_scaled_rope(theirs: Mapping[str, Any], *parameters: Mapping[str, Any]) -> None:
    """Raise ModelError if rotary angles are scaled, by a new or an old key of `transformers`."""
    refuse(theirs, {"rope_scaling": (None,)})
    for rope in parameters:
        refuse(rope, dict.fromkeys(("rope_type", "type"), ("default",)))


def require(config: EncoderConfig, model_type: str, **needed: object) -> None:
    """Raise Inexpressible unless each setting has the needed value, or one of a tuple of values."""
    for key, values in needed.items():
        allowed = values if isinstance(values, tuple) else (values,)
        if getattr(config, key) not in allowed:
            raise Inexpressible(
                f"transformers' {model_type} cannot express {key}: {getattr(config, key)!r}"
            )


def join(state: Mapping[str, Tensor], joined: str, parts: Sequence[str]) -> dict[str, Tensor]:
    """The tensors with the `parts` in their names as one whose name has `joined` there.

    Raises ModelError for a first part without the others.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if parts[0] in name:
            names = [name.replace(parts[0], part) for part in parts]
            if missing := [other for other in names if other not in state]:
                raise ModelError(f"the weights have no {missing[0]}")
            result[name.replace(parts[0], joined)] = torch.cat([state[other] for other in names])
        elif not any(part in name for part in parts):
            result[name] = tensor
    return result


def cut(state: Mapping[str, Tensor], joined: str, parts: Sequence[str]) -> dict[str, Tensor]:
    """The reverse of `join`; a tensor that has no equal parts stays as it is."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if joined not in name or len(tensor) % len(parts):
            result[name] = tensor
            continue
        for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True):
            result[name.replace(joined, part)] = piece.clone()  # files hold no shared memory
    return result


def join_gates(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join each gate and up projection, as they are here."""
    return join(state, BOTH_GATES, GATES)


def split_gates(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `join_gates`."""
    return cut(state, BOTH_GATES, GATES)
