"""Strict conversion of a plain tree (strings, numbers, lists, mappings) into a dataclass.

- A number has no quotes and is finite; an integer fits into 64 bits. An integer is accepted where a
  float is expected; a boolean never is.
- A boolean is true or false, yes or no, on or off, as in YAML 1.1; a number never is one.
- A string is taken as written, with or without quotes: ``007`` stays ``007``.
- An empty section, list or mapping may be null.
"""

import dataclasses
import difflib
import functools
import math
import re
import reprlib
import types
import typing
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from configs.errors import ConfigError
from configs.kinds import KIND, chosen, kinds_of
from configs.yaml_text import Plain

# transformers' configs and TrainingArguments, run_mlm.py, DeepSpeed. A key may be of a section that
# stands beside: optimizer.kind.
_KEYS = {
    "attention_probs_dropout_prob": "attention_dropout",
    "bf16": "precision",
    "fp16": "precision",
    "gradient_checkpointing": "checkpoint_activations",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "intermediate_size": "ffn_size",
    "layer_norm_eps": "norm_eps",
    "lr": "learning_rate",
    "lr_scheduler_type": "schedule.kind",
    "max_grad_norm": "gradient_clipping",
    "max_position_embeddings": "max_positions",
    "max_seq_length": "sequence_length",
    "max_steps": "steps",
    "mlm_probability": "masking.rate",
    "num_attention_heads": "heads",
    "num_hidden_layers": "layers",
    "num_key_value_heads": "kv_heads",
    "num_train_epochs": "epochs",
    "num_warmup_steps": "warmup_steps",
    "optim": "optimizer.kind",
    "per_device_train_batch_size": "batch.micro_batch",
    "torch_compile": "compile",
    "type_vocab_size": "segment_types",
    "warmup_ratio": "warmup_fraction",
}


def our_key(name: str, keys: Sequence[str]) -> str | None:
    """The key that another library calls `name`, if the section with these `keys` has it."""
    key = _KEYS.get(name)
    return key if key and key.partition(".")[0] in keys else None


T = TypeVar("T")

UNSET = "???"  # marks a value that the user of a file must set
_WHOLE = re.compile(r"[-+]?(?:\d+(?:_\d+)*|0x[0-9a-fA-F]+)", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)
_NOT_FINITE = re.compile(r"[-+]?\.?(?:inf|nan)", re.IGNORECASE)
_TRUTHS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_LISTS, _MAPPINGS = (list, Sequence), (dict, Mapping)  # types that lists and mappings may have
_MAX_DIGITS = 400  # of a number; the largest float has 309

_shown = reprlib.Repr()
_shown.maxlevel, _shown.maxother, _shown.maxstring = 2, 60, 60


def build(tree: Any, schema: type[T], path: str = "") -> T:
    """Convert a mapping into a dataclass, or the kind of it that it names; `path` is its full key.

    Raises ConfigError, which begins with the full key of the invalid value.
    """
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: expected keys and values, not {shown(tree)}")
    kinds, schema = kinds_of(schema), _kind(tree, schema, path)
    fields = {field.name: field for field in dataclasses.fields(schema) if field.init}  # type: ignore[arg-type]
    for key in tree:
        if key not in fields:
            raise ConfigError(f"{inside(path, key)}: {_unknown(key, kinds, schema)}")
    hints = hints_of(typing.cast(Any, schema))
    values = {
        key: ""  # null clears a text that is empty by default
        if value is None and fields[key].default == ""
        else convert(value, hints[key], inside(path, key))
        for key, value in tree.items()
    }
    for name, field in fields.items():
        is_required = field.default is field.default_factory is dataclasses.MISSING
        if name not in values and is_required:
            raise ConfigError(f"{inside(path, name)}: must be set")
    try:
        return schema(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(inside(path, str(error))) from error


def _unknown(key: str, kinds: Mapping[str, Any], schema: Any) -> str:
    """Why a key that is not one of the `schema` is refused; other `kinds` may have it."""
    others = [name for name, schema in kinds.items() if key in schema.__dataclass_fields__]
    if others:
        return f"is for kind: {', '.join(others)}; remove it"
    if key == "base":
        return "must be the name or the path of one file"
    if ":" in key:
        return "unknown key; write a space after its colon"
    fields = [field.name for field in dataclasses.fields(schema) if field.init]
    if ours := our_key(key, fields):
        return f"unknown key; here it is {ours}"
    return f"unknown key{_near_or_deeper(key, fields, schema)}"


def _near_or_deeper(key: str, fields: Sequence[str], schema: Any) -> str:
    """A suggestion: a field spelled nearly like `key`, or keys of this name in inner sections."""
    name, _, rest = _KEYS.get(key, key).partition(".")
    sections, deeper = [("", schema)], []
    for _ in range(3):
        sections = [
            (inside(path, field), option)
            for path, section in sections
            for field, hint in hints_of(section).items()
            for option in options_of(hint)
            if dataclasses.is_dataclass(option)
        ]
        deeper += [path for path, section in sections if name in section.__dataclass_fields__]
    if not 1 <= len(deeper) <= 3 or difflib.get_close_matches(key, fields, cutoff=0.8):
        return nearest(key, fields)
    ending = f"{name}.{rest}" if rest else name
    return f"; did you mean {' or '.join(f'{path}.{ending}' for path in deeper)}?"


def _kind(tree: Mapping[str, Any], schema: type[T], path: str) -> type[T]:
    """The dataclass that the tree is for, where `schema` comes in kinds."""
    kinds = kinds_of(schema)
    kind: type[T] = chosen(schema, tree)
    if kinds and kind is schema:
        name = tree[KIND]
        wanted = _guess(name, list(kinds)) if isinstance(name, str) else ""
        raise ConfigError(
            f"{inside(path, KIND)}: must be one of {', '.join(kinds)}, or one that a plugin adds "
            f"(plugins, --plugin), not {shown(name)}{wanted}"
        )
    return kind


def convert(value: Any, hint: Any, path: str) -> Any:
    """Convert a value of the tree to the type `hint` of its field."""
    options = [option for option in options_of(hint) if option is not type(None)]
    if value == UNSET and isinstance(value, str):
        raise ConfigError(f"{path}: must be set; {UNSET} is a placeholder")
    if value is None:
        return _nothing(hint, options, path)
    option = next((option for option in options if has_form(value, option)), options[0])
    origin = typing.get_origin(option)
    if origin in _LISTS:
        return _list(value, typing.get_args(option)[0], path)
    if origin in _MAPPINGS:
        of_keys, inner = typing.get_args(option)
        return _mapping(value, of_keys, inner, path)
    if dataclasses.is_dataclass(option):
        return build(value, typing.cast(type[Any], option), path)
    return _SCALARS[option](value, path)


def _nothing(hint: Any, options: list[Any], path: str) -> Any:
    if type(None) in options_of(hint) or Any in options:
        return None
    if typing.get_origin(options[0]) in (*_LISTS, *_MAPPINGS):
        return [] if typing.get_origin(options[0]) in _LISTS else {}
    if dataclasses.is_dataclass(options[0]):
        return build({}, typing.cast(type[Any], options[0]), path)
    raise ConfigError(f"{path}: must not be null")


def has_form(value: Any, option: Any) -> bool:
    """Whether a value has the outer form of an option: mapping, list or scalar."""
    origin = typing.get_origin(option)
    if isinstance(value, Mapping):
        return origin in _MAPPINGS or dataclasses.is_dataclass(option)
    return (origin in _LISTS) if isinstance(value, list) else origin is None


def _list(value: Any, inner: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{path}: expected a list, not {shown(value)}")
    return [convert(item, inner, f"{path}[{number}]") for number, item in enumerate(value)]


def _mapping(value: Any, of_keys: Any, inner: Any, path: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: expected keys and values, not {shown(value)}")
    converted: dict[Any, Any] = {}
    for key, item in value.items():
        word = Plain(key) if isinstance(key, str) else key
        converted_key = convert(word, of_keys, f"{path}: key {shown(word)}")
        if converted_key in converted:
            raise ConfigError(f"{path}: {converted_key} appears twice")
        converted[converted_key] = convert(item, inner, inside(path, key))
    return converted


def _whole(value: Any, path: str) -> int:
    if isinstance(value, Plain) and _WHOLE.fullmatch(value) and len(value) < _MAX_DIGITS:
        value = int(value, 16 if "x" in value else 10)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{path}: must be a whole number, not {shown(value)}")
    if not -(2**63) <= value < 2**63:
        raise ConfigError(f"{path}: {shown(value)} does not fit into 64 bits")
    return value


def _number(value: Any, path: str) -> float:
    if isinstance(value, Plain) and _NOT_FINITE.fullmatch(value):
        value = math.inf
    elif isinstance(value, Plain) and _NUMBER.fullmatch(value) and len(value) < _MAX_DIGITS:
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path}: must be a number, not {shown(value)}")
    try:
        number = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(f"{path}: must be a finite number")
    return number


def _truth(value: Any, path: str) -> bool:
    if isinstance(value, Plain):
        value = _TRUTHS.get(value.lower(), value)
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: must be true or false, not {shown(value)}")
    return value


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{path}: must be a text, not {shown(value)}")
    if any(map(_is_control, value)):
        raise ConfigError(f"{path}: has a control character: {shown(value)}")
    return str(value)


def _is_control(character: str) -> bool:
    """Whether a character is a control character or a lone surrogate."""
    return unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t"


def _anything(value: Any, path: str) -> Any:
    """A subtree for another schema: numbers, booleans and strings are recognised by their form."""
    if isinstance(value, Mapping):
        return {str(key): _anything(item, path) for key, item in value.items()}
    if isinstance(value, list):
        return [_anything(item, path) for item in value]
    if not isinstance(value, Plain):
        return value
    if _WHOLE.fullmatch(value):
        return _whole(value, path)
    if _NUMBER.fullmatch(value):
        return _number(value, path)
    return {"true": True, "false": False}.get(value, str(value))


_SCALARS: dict[Any, Callable[[Any, str], Any]] = {
    int: _whole,
    float: _number,
    bool: _truth,
    str: _text,
    Any: _anything,
}


@functools.cache
def hints_of(schema: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    hints = typing.get_type_hints(schema)
    return {key: hint for key, hint in hints.items() if typing.get_origin(hint) is not ClassVar}


def options_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def inside(path: str, key: Any) -> str:
    """The full key of `key` in the section at `path`; a key that has this prefix stays as it is."""
    key = str(key)
    return f"{path}.{key}" if path and not key.startswith(f"{path}.") else key


def _guess(name: str, candidates: Sequence[str]) -> str:
    """A suggestion for a message: the nearest of the `candidates`; empty where none is near."""
    match = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else ""


def nearest(name: str, candidates: Sequence[str]) -> str:
    """A suggestion for a message: the nearest of the `candidates`, or all of them."""
    listed = f"; there are: {', '.join(candidates)}" if candidates else ""
    return _guess(name, candidates) or listed


def nearest_of_all(name: str, candidates: Sequence[str]) -> str:
    """The message of `nearest`, and all of the `candidates` behind a suggestion."""
    guess = _guess(name, candidates)
    return f"{guess} There are: {', '.join(candidates)}" if guess else nearest(name, candidates)


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    return _shown.repr(value)
