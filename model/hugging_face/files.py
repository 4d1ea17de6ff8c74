"""The files of a model folder besides its weights: their names, its JSON, and its tokenizer's."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from model.errors import ModelError
from model.model_config import ModelConfig

_TOKENIZER_CONFIG = "tokenizer_config.json"
TRUNCATION = (_TOKENIZER_CONFIG, "model_max_length")  # the file and its key
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
    *("model.onnx", "model_int8.onnx", "sentence_bert_config.json"),
)

_OTHER_FILES = ("corpus.json", "manifest.json", "config.yaml")  # of a corpus, checkpoint, run


def require_free(folder: str | Path) -> None:
    """Raise ModelError where `folder` has files that a model would overwrite, or is no model's."""
    for name in _OTHER_FILES:
        if os.path.lexists(path := Path(folder) / name):
            raise ModelError(f"{path}: a model does not go beside this file; choose another --out")
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


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a file of JSON; as `read_value`."""
    theirs = read_value(path)
    if not isinstance(theirs, dict):
        raise ModelError(f"{path}: expected a mapping")
    return theirs


def read_value(path: Path) -> Any:
    """The content of a file of JSON; raises ModelError where there is none."""
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


def tokenizer_files(source: Path) -> list[Path]:
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
        content = read_json(path)
        if path.name == "tokenizer.json" and not isinstance(content.get("model"), dict):
            raise ModelError(f"{path}: not a tokenizer: it has no model")
        return
    try:
        data = path.read_bytes()
        if path.suffix == ".txt":
            data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error


def fit_tokenizer(folder: Path, config: ModelConfig, source: Path) -> None:
    """Let the copied tokenizer truncate to the model's longest sequence, and give what it reads.

    It pads and truncates at the end, as in training, whatever the files say. The number of tokens
    in the folder of another model is kept if it is less.

    `source` is the config.json beside the tokenizer that was copied, if there is one. Without
    `model_input_names` a class of `transformers` may give segment ids to a model that has no
    vectors for them: ModernBERT refuses them, RoBERTa looks for a second row.
    """
    path = folder / _TOKENIZER_CONFIG
    theirs = read_json(path) if path.is_file() else {}
    segments = ["token_type_ids"] if config.reads_segments else []
    names = ["input_ids", *segments, "attention_mask"]
    sides = dict.fromkeys(("padding_side", "truncation_side"), "right")
    fitted = {**theirs, **sides, "model_input_names": names}
    given = fitted.pop(TRUNCATION[1], None)
    if limits := [*filter(None, (source.is_file() and given, config.longest_sequence))]:
        fitted[TRUNCATION[1]] = min(limits)
    of_source = read_json(source).get("model_type") if source.is_file() else None
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
    tree = read_json(path)
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
