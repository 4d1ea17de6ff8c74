"""Reading and writing whole model folders."""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from torch import Tensor

from configs.kinds import chosen, kinds_of
from model.errors import ModelError
from model.hugging_face import conversion
from model.hugging_face.family import Inexpressible
from model.hugging_face.task_heads import VECTOR_KEY
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
POOLINGS = {"cls": "first", "mean": "mean"}  # their names and ours
_POOLING, _NORMALIZE = "Pooling", "Normalize"
_KNOWN = ("Transformer", _POOLING, _NORMALIZE)
_OLDER = {"cls_token": "cls", "mean_tokens": "mean"}  # keys of `pooling_mode_...`, true or false


def read_vector(folder: Path, read: Callable[[Path], Any]) -> dict[str, Any] | None:
    """`pooling` and `normalise` of a `TaskHeadConfig`; None where the folder has no modules.

    `read` reads a file of JSON. Raises ModelError, one line, for modules of other kinds.
    """
    if not (folder / MODULES).exists():
        return None
    modules = {str(module["type"]).rpartition(".")[2]: module for module in read(folder / MODULES)}
    if unknown := ", ".join(modules.keys() - {*_KNOWN}):
        raise ModelError(
            f"{MODULES}: its vectors go through {unknown}, which is not read here; to use the "
            f"encoder alone, name a copy of the folder without {MODULES}"
        )
    if _POOLING not in modules:
        return None
    file = folder / str(modules[_POOLING]["path"]) / "config.json"
    mode = _mode(read(file))
    if mode not in POOLINGS:
        raise ModelError(f"{file.relative_to(folder)}: pools by {mode}; cls and mean are read here")
    return {"pooling": POOLINGS[mode], "normalise": _NORMALIZE in modules}


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
    "sentencepiece.model",
    "spm.model",
    "tokenizer.model",
)
# Of models that are written as RoBERTa, whose own tokenizer is another.
_TOKENIZER_CLASSES = {"xlm-roberta": "XLMRobertaTokenizer", "camembert": "CamembertTokenizer"}
VOCABULARIES = {
    *("tokenizer.json", "vocab.txt", "vocab.json"),
    *(name for name in TOKENIZER_FILES if name.endswith(".model")),
}
MODEL_FILES = (
    *("config.json", "model.safetensors", "README.md", "model.yaml"),
    *("model.onnx", "model_int8.onnx"),
)


def require_free(folder: str | Path) -> None:
    """Raise ModelError for the first file in `folder` that a model would overwrite."""
    for name in (*MODEL_FILES, *TOKENIZER_FILES):
        if os.path.lexists(path := Path(folder) / name):
            raise ModelError(f"{path}: exists; move it away, or choose another --out")


@contextmanager
def written_whole(folder: Path) -> Iterator[None]:
    """Remove the files of a model that were begun in `folder` where one cannot be written.

    Also where whoever writes them is interrupted. So the same command can be repeated. Raises
    ModelError for an OSError.
    """
    paths = [folder / name for name in (*MODEL_FILES, *TOKENIZER_FILES)]
    begun = [path for path in paths if not os.path.lexists(path)]
    try:
        yield
    except BaseException as error:
        for path in begun:
            with suppress(OSError):
                path.unlink()
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise ModelError(f"{folder}: cannot be written ({reason})") from error
        raise


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
    files = [] if tokenizer is None else _tokenizer_files(Path(tokenizer))
    reason = ""
    try:
        theirs, tensors = conversion.to_transformers(config, state)
        theirs |= {key: special_ids[key] for key in SPECIAL_IDS if key in special_ids}
    except Inexpressible as error:
        reason = f"{error}; saved in Tandem's own format"
        theirs, tensors = {"model_type": OWN_TYPE, **dataclasses.asdict(config)}, state
    with written_whole(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(theirs, indent=2, sort_keys=True) + "\n")
        write_tensors(folder / "model.safetensors", tensors)
        of_format = card or partial(model_card, folder.resolve().name, config, None)
        (folder / "README.md").write_text(of_format(not reason), encoding="utf-8")
        for path in files:
            if path.resolve() != (folder / path.name).resolve():
                shutil.copyfile(path, folder / path.name)
        if files:
            _fit_tokenizer(folder, config, files[0].with_name("config.json"))
    return reason


def _fit_tokenizer(folder: Path, config: ModelConfig, source: Path) -> None:
    """Let the copied tokenizer truncate to the model's longest sequence, and give what it reads.

    `source` is the config.json beside the tokenizer that was copied, if there is one. Without
    `model_input_names` a class of `transformers` may give segment ids to a model that has no
    vectors for them: ModernBERT refuses them, RoBERTa looks for a second row.
    """
    path = folder / _TOKENIZER_CONFIG
    theirs = _read_json(path) if path.is_file() else {}
    segments = ["token_type_ids"] if config.reads_segments else []
    fitted = {**theirs, "model_input_names": ["input_ids", *segments, "attention_mask"]}
    longest = config.longest_sequence
    if longest is not None and (theirs.get("model_max_length") or math.inf) > longest:  # or null
        fitted["model_max_length"] = longest
    of_source = _read_json(source).get("model_type") if source.is_file() else None
    if of_source in _TOKENIZER_CLASSES:
        fitted.setdefault("tokenizer_class", _TOKENIZER_CLASSES[of_source])
    vocabulary = folder / "tokenizer.json"
    if segments and vocabulary.is_file() and _number_texts(vocabulary):
        fitted["tokenizer_class"] = "PreTrainedTokenizerFast"  # RoBERTa's own would undo it
    path.write_text(json.dumps(fitted, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _number_texts(path: Path) -> bool:
    """Let a tokenizer.json give the second text of a pair segment id 1; whether it gave 0.

    RoBERTa's gives 0, and a model of another family that was trained with it reads 1.
    """
    tree = _read_json(path)
    form = tree.get("post_processor") or {}
    parts = form.get("processors") or [form]
    if parts[-1].get("type") == "RobertaProcessing":
        *others, roberta = parts
        offsets = {key: roberta[key] for key in ("add_prefix_space", "trim_offsets")}
        parts = [*others, {"type": "ByteLevel", "use_regex": True, **offsets}, _template(roberta)]
    pair = parts[-1].get("pair", [])
    given = [place for part in pair for place in part.values()]
    second = next(
        (n for n, part in enumerate(pair) if part.get("Sequence", {}).get("id") == "B"), 0
    )
    if not second or any(place["type_id"] for place in given):
        return False
    for place in given[second:]:
        place["type_id"] = 1
    tree["post_processor"] = {"type": "Sequence", "processors": parts}
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return True


def _template(roberta: Mapping[str, Any]) -> dict[str, Any]:
    """The form of RoBERTa's post-processor as a template, which has segment ids."""
    (cls, _), (sep, _) = roberta["cls"], roberta["sep"]
    first, last = ({"SpecialToken": {"id": token, "type_id": 0}} for token in (cls, sep))
    texts = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    special = {
        token: {"id": token, "ids": [number], "tokens": [token]}
        for token, number in (roberta["cls"], roberta["sep"])
    }
    single = [first, texts[0], last]
    pair = [*single, last, texts[1], {"SpecialToken": {"id": sep, "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _tokenizer_files(source: Path) -> list[Path]:
    """The files that AutoTokenizer reads. Raises ModelError if there are none or one is damaged."""
    files = [source / name for name in TOKENIZER_FILES if os.path.lexists(source / name)]
    if not files:
        raise ModelError(f"{source}: holds no tokenizer files")
    if VOCABULARIES.isdisjoint(path.name for path in files):
        raise ModelError(f"{files[0]}: has no vocabulary beside it; add its tokenizer.json")
    for path in files:
        _require_well_formed(path)
    return files


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


def read_folder(folder: Path, kind: str = "") -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the state, float32, of a model folder."""
    path = folder / "config.json"
    theirs = _read_json(path)
    config: ModelConfig
    try:
        if VECTOR_KEY not in theirs and (vector := read_vector(folder, _read_value)):
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
    theirs = _read_json(folder / "config.json")
    return {key: theirs[key] for key in SPECIAL_IDS if isinstance(theirs.get(key), int)}


def _read_json(path: Path) -> dict[str, Any]:
    theirs = _read_value(path)
    if not isinstance(theirs, dict):
        raise ModelError(f"{path}: expected a mapping")
    return theirs


def _read_value(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if not path.parent.exists():
            raise ModelError(
                f"{path.parent}: no such folder; name the folder of a model: none is downloaded"
            ) from error
        exports = path.parent / "exports"
        hint = f"; the models of this run are in {exports}" if exports.is_dir() else ""
        raise ModelError(f"{path}: not found; a model folder has a config.json{hint}") from error
    except NotADirectoryError as error:
        raise ModelError(f"{path.parent}: is a file; a model is a folder") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON") from error


def _read_own(theirs: Mapping[str, Any]) -> ModelConfig:
    values = {key: value for key, value in theirs.items() if key != "model_type"}
    schema = chosen(ModelConfig, values)
    known = {field.name for field in dataclasses.fields(schema)}
    unknown = sorted(values.keys() - known)
    if unknown:
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
    require_free(out)
    model = from_pretrained(source)
    if not model.config.is_trainable:
        raise ModelError(
            f"{source}: {model.config.description} can only be a frozen teacher, which needs no "
            "import; name the folder in teacher.init.pretrained, with teacher.frozen"
        )
    has_tokenizer = any(os.path.lexists(source / name) for name in TOKENIZER_FILES)
    tokenizer = source if has_tokenizer else None
    with written_whole(out):
        save_pretrained(model, out, tokenizer, special_ids=special_ids_in(source))
        write_config(model.config, out, source.resolve().name)
    return model


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
    write_config(config, out, source.resolve().name)
    return from_pretrained(out)


def write_config(config: ModelConfig, folder: Path, source: str) -> None:
    """Write model.yaml, which a job can name, beside the weights; `source` goes into a comment."""
    text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
    (folder / "model.yaml").write_text(f"# The model of {source}\n{text}")
