"""Reading and writing whole model folders."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor

from configs import ConfigError, typed
from configs.kinds import chosen
from model.config import EncoderConfig
from model.errors import ModelError
from model.hugging_face.albert import ALBERT
from model.hugging_face.bert import BERT, ROBERTA
from model.hugging_face.distilbert import DISTILBERT
from model.hugging_face.family import Family, Inexpressible
from model.hugging_face.mobilebert import MOBILEBERT
from model.hugging_face.modernbert import MODERNBERT
from model.hugging_face.task_heads import (
    ENDINGS,
    in_form,
    read_task_heads,
    write_task_head,
    write_vector_head,
)
from model.hugging_face.tensors import (
    checked_state,
    refuse_extra_weights,
    refuse_implausible_depth,
    tensor_names,
)
from model.hugging_face.weights import read_weights, write_tensors
from model.initialisation import empty
from model.model_card import model_card
from model.model_config import Ability, ModelConfig
from model.protocol import Model
from model.task_head_config import TaskHeadConfig

Config = TypeVar("Config", bound=ModelConfig)
FAMILIES: tuple[Family, ...] = (BERT, ROBERTA, DISTILBERT, ALBERT, MOBILEBERT, MODERNBERT)
OWN_TYPE = "tandem"
# Exceptions caused by wrong values in config.json; torch raises RuntimeError for huge sizes.
_WRONG_VALUES = (
    *(ValueError, TypeError, AttributeError),
    *(ArithmeticError, LookupError, RuntimeError),
)
# Keys of config.json for token ids that the tokenizer uses and the model does not.
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
_TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
VOCABULARIES = {
    "tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model"
}  # fmt: skip
MODEL_FILES = ("config.json", "model.safetensors", "README.md", "model.yaml", "model.onnx")


def require_free(folder: str | Path) -> None:
    """Raise ModelError for the first file in `folder` that a model would overwrite."""
    for name in (*MODEL_FILES, *TOKENIZER_FILES):
        if os.path.lexists(path := Path(folder) / name):
            raise ModelError(f"{path}: exists; move it away, or choose another --out")


def from_pretrained(folder: str | Path) -> Model:
    """The model in a folder of `transformers` or of Tandem's own format, float32, in eval mode.

    Raises ModelError, one line naming the file, for a folder that is not such a model.
    """
    folder = Path(folder)
    config, state = read_folder(folder)
    model = empty(config)
    model.load_state_dict(state)
    return model.eval()


def encoder_from_pretrained(folder: str | Path) -> Model:
    """As `from_pretrained`; raises ModelError for a model that reads a source and a target too."""
    model = from_pretrained(folder)
    _require_encoder(folder, model.config)
    return model


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of the model in a folder; as `from_pretrained`."""
    return read_folder(Path(folder))[0]


def read_encoder_config(folder: str | Path) -> ModelConfig:
    """As `read_config`; raises ModelError for a model that reads a source and a target too."""
    config = read_config(folder)
    _require_encoder(folder, config)
    return config


def _require_encoder(folder: str | Path, config: ModelConfig) -> None:
    if Ability.GENERATE in config.abilities:
        raise ModelError(f"{folder}: translates; name an encoder")


def save_pretrained(
    model: Model | tuple[ModelConfig, Mapping[str, Tensor]],
    folder: str | Path,
    tokenizer: str | Path | None = None,
    card: str = "",
    special_ids: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """Write a model, or its configuration and state, as a folder that `transformers` loads.

    Tokenizer files are copied from the folder `tokenizer`. Its `special_ids` (by the keys of
    `SPECIAL_IDS`) go into config.json. README.md is `card`, made by `model_card`; by default it is
    a card without training. Returns an empty string if `transformers` can express the model.
    Otherwise it returns one line that says why not, and the folder has Tandem's own format.
    """
    if isinstance(model, Model):
        config, state = model.config, dict(model.state_dict())
    else:
        config, state = model[0], dict(model[1])
    folder = Path(folder)
    files = [] if tokenizer is None else _tokenizer_files(Path(tokenizer))
    reason = ""
    try:
        theirs, tensors = to_transformers(config, state)
        theirs |= {key: special_ids[key] for key in SPECIAL_IDS if key in special_ids}
    except Inexpressible as error:
        reason = f"{error}; saved in Tandem's own format"
        theirs, tensors = {"model_type": OWN_TYPE, **dataclasses.asdict(config)}, state
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(theirs, indent=2, sort_keys=True) + "\n")
        write_tensors(folder / "model.safetensors", tensors)
        card = card or model_card(folder.resolve().name, config)
        (folder / "README.md").write_text(card, encoding="utf-8")
        for path in files:
            if path.resolve() != (folder / path.name).resolve():
                shutil.copyfile(path, folder / path.name)
        _limit_tokenizer(folder, config.longest_sequence)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written ({error.strerror or error})") from error
    return reason


def _limit_tokenizer(folder: Path, longest: int | None) -> None:
    """Let the copied tokenizer truncate to the model's `longest` sequence; None: no limit."""
    path = folder / _TOKENIZER_CONFIG
    if longest is None or not path.is_file():
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    if (config.get("model_max_length") or math.inf) > longest:  # null is no limit
        path.write_text(json.dumps({**config, "model_max_length": longest}, indent=2) + "\n")


def _tokenizer_files(source: Path) -> list[Path]:
    """The files that AutoTokenizer reads. Raises ModelError if there are none or one is damaged."""
    found = [source / name for name in TOKENIZER_FILES if os.path.lexists(source / name)]
    if not found:
        raise ModelError(f"{source}: holds no tokenizer files")
    if VOCABULARIES.isdisjoint(path.name for path in found):
        raise ModelError(f"{found[0]}: has no vocabulary beside it; add its tokenizer.json")
    for path in found:
        _require_well_formed(path)
    return found


def _require_well_formed(path: Path) -> None:
    """Raise ModelError if the content of a file does not fit its name."""
    if path.suffix == ".json":
        content = _read_json(path)
        if path.name == "tokenizer.json" and not isinstance(content.get("model"), dict):
            raise ModelError(f"{path}: not a tokenizer: it has no model")
        return
    try:
        data = path.read_bytes()
        if path.suffix == ".txt":
            data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error


def with_task_head(config: Config, name: str, head: TaskHeadConfig) -> Config:
    """The model with this head too, in the form that `transformers` has for its architecture.

    What `head` leaves open (`pooling`, `transform`) is chosen so. The model gets a pooler where the
    head reads one, and loses one that no head reads: `transformers` has none then, and it would
    never be trained. Another kind of model than an encoder has forms of its own.
    """
    if not isinstance(config, EncoderConfig):
        return config.with_task_head(name, head)
    whole = in_form(head, nearest_family(config).heads.get(head.kind))
    heads = {**config.task_heads, name: whole}
    pooler = config.pooler
    if not any(one.pooling == "pooler" for one in heads.values()):
        pooler = config.pooler if config.pair_head else "none"
    elif pooler == "none":
        pooler = "tanh"
    return replace(config, task_heads=heads, pooler=pooler)


def with_head_alone(
    config: Config, name: str, state: Mapping[str, Tensor]
) -> tuple[Config, dict[str, Tensor]]:
    """The model with this task head and no other, and its part of the `state`.

    `transformers` has a class for it. Raises ModelError where there is no such head.
    """
    if name not in config.task_heads:
        there = ", ".join(config.task_heads) or "none"
        raise ModelError(f"no task head {name}; there are: {there}")
    bare = replace(config, task_heads={}, mlm_head=False, pair_head=False)
    alone = with_task_head(bare, name, config.task_heads[name])
    names = set(tensor_names(alone))
    return alone, {own: tensor for own, tensor in state.items() if own in names}


def nearest_family(config: EncoderConfig) -> Family:
    """The `transformers` architecture that is closest to a configuration."""
    if config.embedding_projection == "word" or config.bottleneck_size:
        return MOBILEBERT
    if config.positions == "rotary":
        return MODERNBERT
    if config.embedding_projection == "sum" or config.sharing != "none":
        return ALBERT
    if config.positions == "learned_after_padding":
        return ROBERTA
    return BERT if config.segment_types else DISTILBERT


def to_transformers(
    config: ModelConfig, state: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json and the tensors in the format of `transformers`.

    Raises Inexpressible, naming what does not fit.
    """
    if not isinstance(config, EncoderConfig):
        raise Inexpressible(f"transformers has no class for a model of kind {config.kind}")
    family = nearest_family(config)
    theirs = family.write(config) | {"model_type": family.model_type, "dtype": "float32"}
    theirs |= _heads_of_a_fine_tuned(config, family, theirs["architectures"][0])
    names = family.their_names(config, state)
    _require_same_meaning(config, _read(family, theirs, set(names.values())), family)
    return theirs, family.join({names[name]: tensor for name, tensor in state.items()})


def _heads_of_a_fine_tuned(
    config: EncoderConfig, family: Family, architecture: str
) -> dict[str, Any]:
    """Adjust `architectures` for a model without a masked-LM head, and add its task head."""
    if not config.task_heads:
        return {} if config.mlm_head else {"architectures": [_class(architecture, "Model")]}
    if len(config.task_heads) > 1:
        raise Inexpressible("transformers has one task head in a model")
    if config.mlm_head or config.pair_head:
        raise Inexpressible("transformers has no class with a task head and pre-training heads")
    ((name, head),) = config.task_heads.items()
    if head.branches:
        raise Inexpressible("transformers has no class with a classifier after every layer")
    form = family.heads.get(head.kind)
    vector = write_vector_head(name, head)
    if vector is not None:
        return vector | {"architectures": [_class(architecture, "Model")]}
    if form is None:
        raise Inexpressible(f"transformers has no class for a head of kind {head.kind}")
    heads = write_task_head(name, head, form)
    return heads | {"architectures": [_class(architecture, ENDINGS[head.kind])]}


def _class(architecture: str, ending: str) -> str:
    """Another class of the same family: ("BertForMaskedLM", "Model") -> "BertModel"."""
    return architecture.partition("For")[0] + ending


def _read(family: Family, theirs: Mapping[str, Any], names: Collection[str]) -> EncoderConfig:
    """The configuration; `mlm_head` is false if the weights have no tensor of that head."""
    values = family.read(theirs, names)
    heads = read_task_heads(theirs, names, family.heads)
    if heads:
        plain = {name: dataclasses.asdict(head) for name, head in heads.items()}
        values |= {"task_heads": plain, "mlm_head": False}
        return _configuration(values, EncoderConfig)
    config = _configuration(values, EncoderConfig)
    expected = family.their_names(config, tensor_names(config))
    head = [name for ours, name in expected.items() if ours.startswith("head.")]
    return config if any(name in names for name in head) else replace(config, mlm_head=False)


def _with_prefix(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the prefix that `transformers` omits when it saves an encoder without heads."""
    (word,) = family.their_names(EncoderConfig(), ["embeddings.word.weight"]).values()
    prefix, _, rest = word.partition(".")
    bare = rest in tensors and word not in tensors
    return {f"{prefix}.{name}" if bare else name: one for name, one in tensors.items()}


def _require_same_meaning(config: EncoderConfig, read_back: EncoderConfig, family: Family) -> None:
    """Raise Inexpressible if any key has changed its meaning after writing and reading back."""
    ours, theirs = config.meaning(), read_back.meaning()
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise Inexpressible(
                f"transformers' {family.model_type} cannot express {key}: {getattr(config, key)!r}"
            )


def read_folder(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the state, float32, of a model folder."""
    path = folder / "config.json"
    theirs = _read_json(path)
    weights = read_weights(folder)
    config: ModelConfig
    try:
        refuse_implausible_depth(theirs, weights)
        if theirs.get("model_type") == OWN_TYPE:
            config, state = _read_own(theirs), weights
            refuse_extra_weights(config, state, tensor_names)
        else:
            config, state = _from_transformers(theirs, weights)
        return config, checked_state(config, state)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    except _WRONG_VALUES as error:
        raise ModelError(f"{path}: {' '.join(str(error).split())[:300]}") from error


def special_ids_in(folder: Path) -> dict[str, int]:
    """The special token ids in the config.json of a model folder."""
    theirs = _read_json(folder / "config.json")
    return {key: theirs[key] for key in SPECIAL_IDS if isinstance(theirs.get(key), int)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path}: not found; a model folder has a config.json") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON") from error
    if not isinstance(theirs, dict):
        raise ModelError(f"{path}: expected a mapping")
    return theirs


def _read_own(theirs: Mapping[str, Any]) -> ModelConfig:
    values = {key: value for key, value in theirs.items() if key != "model_type"}
    schema = chosen(ModelConfig, values)
    known = {field.name for field in dataclasses.fields(schema)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise ModelError(f"{unknown[0]}: unknown key; another version wrote this folder")
    return _configuration(values, schema)


def _configuration(values: Mapping[str, Any], schema: type[Config]) -> Config:
    """The configuration from values of a file. Raises ModelError, naming a value that is wrong."""
    try:
        return typed.build(values, schema)
    except ConfigError as error:
        raise ModelError(str(error)) from error


def _from_transformers(
    theirs: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[EncoderConfig, dict[str, Tensor]]:
    known = {family.model_type: family for family in FAMILIES}
    family = known.get(str(theirs.get("model_type")))
    if family is None:
        raise ModelError(
            f"model_type: {theirs.get('model_type')!r} is not one of {', '.join(sorted(known))}"
        )
    modern = {_modern_name(name): tensor for name, tensor in weights.items()}
    tensors = family.split(_with_prefix(family, modern))
    config = _read(family, theirs, tensors)
    refuse_extra_weights(
        config, tensors, lambda one: family.their_names(one, tensor_names(one)).values()
    )
    names = family.their_names(config, tensor_names(config))
    missing = [name for name in names.values() if name not in tensors]
    if missing:
        raise ModelError(f"the weights have no {missing[0]}; import a whole checkpoint")
    return config, {ours: tensors[name] for ours, name in names.items()}


def _modern_name(name: str) -> str:
    """Rename norm parameters: the oldest checkpoints have TensorFlow's names."""
    if name.endswith(".gamma"):
        return name.removesuffix("gamma") + "weight"
    return name.removesuffix("beta") + "bias" if name.endswith(".beta") else name
