"""Reading and writing whole model folders, of `transformers` or in Tandem's own format."""

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from torch import Tensor

from configs.kinds import chosen, kinds_of
from model.errors import ModelError
from model.hugging_face import conversion, files
from model.hugging_face.family import Inexpressible
from model.hugging_face.task_heads import POOLINGS, VECTOR_KEY
from model.hugging_face.weights import (
    checked_state,
    has_weights,
    read_weights,
    refuse_extra_weights,
    refuse_implausible_depth,
    tensor_names,
    write_tensors,
)
from model.initialisation import empty
from model.layer_selection import select_tokens
from model.model_card import model_card
from model.model_config import Ability, ModelConfig
from model.protocol import Model

MODULES = "modules.json"
_VECTOR_LENGTH = "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"
_log = logging.getLogger(__name__)
_POOLING, _NORMALIZE = "Pooling", "Normalize"
_KNOWN = ("Transformer", _POOLING, _NORMALIZE)
_OLDER = {"cls_token": "cls", "mean_tokens": "mean"}  # keys of `pooling_mode_...`, true or false


def read_vector(folder: Path) -> dict[str, Any] | None:
    """`pooling` and `normalise` of a `TaskHeadConfig`; None where the folder has no modules.

    Raises ModelError, one line, for modules of other kinds.
    """
    if not (folder / MODULES).exists():
        return None
    modules = {
        str(module["type"]).rpartition(".")[2]: module
        for module in files.read_value(folder / MODULES)
    }
    if unknown := ", ".join(modules.keys() - {*_KNOWN}):
        raise ModelError(
            f"{MODULES}: its vectors go through {unknown}, which is not read here; to use the "
            f"encoder alone, name a copy of the folder without {MODULES}"
        )
    if _POOLING not in modules:
        return None
    file = folder / str(modules[_POOLING]["path"]) / "config.json"
    mode = _mode(files.read_value(file))
    if mode not in POOLINGS:
        raise ModelError(f"{file.relative_to(folder)}: pools by {mode}; cls and mean are read here")
    _tell_what_is_put_before(folder)
    return {"pooling": POOLINGS[mode], "normalise": _NORMALIZE in modules}


def _tell_what_is_put_before(folder: Path) -> None:
    """Warn about changes to a text by which `sentence-transformers` gives it another vector."""
    prompts, lengths = (
        files.read_json(folder / name) if (folder / name).is_file() else {}
        for name in (_PROMPTS, _VECTOR_LENGTH)
    )
    name = prompts.get("default_prompt_name")
    if prompt := (prompts.get("prompts") or {}).get(name):
        _log.warning(
            "%s: default_prompt_name: its prompt is not put before texts; write it there: %r",
            folder / _PROMPTS,
            prompt,
        )
    if lengths.get("do_lower_case"):
        _log.warning(
            "%s: do_lower_case: texts are read as they are; give them in small letters",
            folder / _VECTOR_LENGTH,
        )


def longest_text(folder: Path, config: ModelConfig) -> int | None:
    """The tokens of a text that the model in `folder` reads; None: any number.

    At most those that `sentence-transformers` reads, where the folder names a number, or else those
    at which `transformers` truncates.
    """
    limits = [config.longest_sequence]
    for name, key in ((_VECTOR_LENGTH, "max_seq_length"), files.TRUNCATION):
        path = folder / name
        limit = files.read_json(path).get(key) if path.is_file() else None
        if isinstance(limit, int):
            limits.append(limit)
            break
    return min(filter(None, limits), default=None)


def _mode(pooling: Mapping[str, Any]) -> str:
    """The name of the pooling; several are joined by +."""
    if "pooling_mode" in pooling:
        return str(pooling["pooling_mode"])
    prefix = "pooling_mode_"
    chosen = [
        key.removeprefix(prefix) for key in pooling if key.startswith(prefix) and pooling[key]
    ]
    return "+".join(_OLDER.get(key, key) for key in chosen)


OWN_TYPE = "tandem"
# Exceptions caused by wrong values in config.json; torch raises RuntimeError for huge sizes.
_WRONG_VALUES = (
    *(ValueError, TypeError, AttributeError),
    *(ArithmeticError, LookupError, RuntimeError),
)
# Keys of config.json for token ids that the tokenizer uses and the model does not.
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


def from_pretrained(folder: str | Path, kind: str = "") -> Model:
    """The model in a folder of `transformers` or of Tandem's own format, float32, in eval mode.

    It is one of this `kind` where that reads folders. Raises ModelError, one line naming the file,
    for a folder that is not such a model.
    """
    folder = Path(folder)
    config, state = read_folder(folder, kind)
    model = empty(config)
    model.load_state_dict(state)
    return model.eval()


def encoder_from_pretrained(folder: str | Path) -> Model:
    """Load a model as `from_pretrained`; raises ModelError also for one that translates."""
    model = from_pretrained(folder)
    _require_encoder(folder, model.config)
    return model


def read_config(folder: str | Path, kind: str = "") -> ModelConfig:
    """The configuration of the model in a folder; as `from_pretrained`."""
    return read_folder(Path(folder), kind)[0]


def read_encoder_config(folder: str | Path) -> ModelConfig:
    """Read a configuration as `read_config`; raises ModelError also for a model that translates."""
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
    card: Callable[[bool], str] | None = None,
    special_ids: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """Write a model, or its configuration and state, as a folder that `transformers` loads.

    Tokenizer files are copied from the folder `tokenizer`. Its `special_ids` (by the keys of
    `SPECIAL_IDS`) go into config.json. Returns an empty string if `transformers` can express the
    model. Otherwise it returns one line that says why not, and the folder has Tandem's own format.
    README.md is what `card` makes of whether it can; by default it is a card without training.
    """
    if isinstance(model, Model):
        config, state = model.config, dict(model.state_dict())
    else:
        config, state = model[0], dict(model[1])
    folder = Path(folder)
    copied = [] if tokenizer is None else files.tokenizer_files(Path(tokenizer))
    reason = ""
    try:
        theirs, tensors = conversion.to_transformers(config, state)
        theirs |= {key: special_ids[key] for key in SPECIAL_IDS if key in special_ids}
    except Inexpressible as error:
        reason = f"{error}; saved in Tandem's own format"
        theirs, tensors = {"model_type": OWN_TYPE, **dataclasses.asdict(config)}, state
    with files.written_whole(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(theirs, indent=2, sort_keys=True) + "\n")
        write_tensors(folder / "model.safetensors", tensors)
        of_format = card or partial(model_card, folder.resolve().name, config, None)
        (folder / "README.md").write_text(of_format(not reason), encoding="utf-8")
        for path in copied:
            if path.resolve() != (folder / path.name).resolve():
                shutil.copyfile(path, folder / path.name)
        if copied:
            files.fit_tokenizer(folder, config, copied[0].with_name("config.json"))
    return reason


def read_folder(folder: Path, kind: str = "") -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the state, float32, of a model folder."""
    path = folder / "config.json"
    theirs = files.read_json(path)
    config: ModelConfig
    try:
        if VECTOR_KEY not in theirs and (vector := read_vector(folder)):
            theirs = {**theirs, VECTOR_KEY: vector}
        if reader := _reader_of(theirs, kind):
            config, state = reader.read_folder(folder, theirs)
            return config, checked_state(config, state)
        weights = read_weights(folder)
        refuse_implausible_depth(theirs, weights)
        if theirs.get("model_type") == OWN_TYPE:
            config, state = _read_own(theirs), weights
            refuse_extra_weights(config, state, tensor_names)
        else:
            config, state = conversion.from_transformers(theirs, weights)
        return config, checked_state(config, state)
    except ModelError as error:  # that of reading the weights names the folder itself
        names_it = str(error).startswith(str(folder))
        raise ModelError(f"{error}" if names_it else f"{folder}: {error}") from error
    except _WRONG_VALUES as error:
        raise ModelError(f"{path}: {' '.join(str(error).split())[:300]}") from error


def _reader_of(theirs: Mapping[str, Any], kind: str) -> type[ModelConfig] | None:
    """The kind that reads a folder itself: `kind`, or the first that knows an unknown model."""
    kinds = kinds_of(ModelConfig)
    if kind in kinds and kinds[kind].reads_folders:
        return kinds[kind]
    if conversion.is_known(theirs):
        return None
    return next(
        (
            candidate
            for candidate in kinds.values()
            if candidate.reads_folders and candidate.reads(theirs)
        ),
        None,
    )


def special_ids_in(folder: Path) -> dict[str, int]:
    """The special token ids in the config.json of a model folder."""
    theirs = files.read_json(folder / "config.json")
    return {key: theirs[key] for key in SPECIAL_IDS if isinstance(theirs.get(key), int)}


def _read_own(theirs: Mapping[str, Any]) -> ModelConfig:
    values = {key: value for key, value in theirs.items() if key != "model_type"}
    schema = chosen(ModelConfig, values)
    known = {field.name for field in dataclasses.fields(schema)}
    unknown = sorted(values.keys() - known)
    if unknown and schema is not ModelConfig:  # else its kind is unknown
        raise ModelError(f"{unknown[0]}: unknown key; another version wrote this folder")
    return conversion.configuration(values, schema)


def import_folder(source: str | Path, out: str | Path) -> Model:
    """Read a `transformers` folder, check it, and write it to `out` for a job to use.

    `out` gets config.json, model.safetensors (float32), the tokenizer files if there are any, and
    model.yaml. A job names model.yaml as ``model:`` and the folder as ``init.pretrained:``. Returns
    the model. Raises ModelError, one line, if the folder holds no such model, or if `out` already
    has files of a model or tokenizer.
    """
    source, out = Path(source), Path(out)
    files.require_free(out)
    model = from_pretrained(source)
    if not model.config.is_trainable:
        raise ModelError(
            f"{source}: {model.config.description} can only be a frozen teacher, which needs no "
            "import; name the folder in teacher.init.pretrained, with teacher.frozen"
        )
    has_tokenizer = any(os.path.lexists(source / name) for name in files.TOKENIZER_FILES)
    tokenizer = source if has_tokenizer else None
    with files.written_whole(out):
        save_pretrained(model, out, tokenizer, special_ids=special_ids_in(source))
        _copy_longest_text(source, out)
        write_config(model.config, out, source.resolve().name)
    return model


def _copy_longest_text(source: Path, out: Path) -> None:
    """Let the model in `out` read as much of a text as the one in `source`; see `longest_text`."""
    if (source / _VECTOR_LENGTH).is_file():
        shutil.copyfile(source / _VECTOR_LENGTH, out / _VECTOR_LENGTH)


def prune_folder(source: str | Path, out: str | Path, tokens: Sequence[int]) -> Model | None:
    """Write the model in `source`, with these tokens of its vocabulary alone, to `out`.

    Their tokenizer is in `out` already. The folder is as one of `import_folder`. Returns the
    model; None where `source` has no weights. Raises ModelError, one line.
    """
    source, out = Path(source), Path(out)
    if not has_weights(source):
        return None
    model = from_pretrained(source)
    try:
        config, state = select_tokens(model.state_dict(), model.config, tokens)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from error
    new = {old: number for number, old in enumerate(tokens)}
    ids = {key: new[old] for key, old in special_ids_in(source).items() if old in new}
    save_pretrained((config, state), out, out, special_ids=ids)
    _copy_longest_text(source, out)
    write_config(config, out, source.resolve().name)
    return from_pretrained(out)


def write_config(config: ModelConfig, folder: Path, source: str) -> None:
    """Write model.yaml, which a job can name, beside the weights; `source` goes into a comment."""
    text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
    (folder / "model.yaml").write_text(f"# The model of {source}\n{text}", encoding="utf-8")
