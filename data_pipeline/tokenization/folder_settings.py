"""The settings in the config files of a tokenizer's folder, in one mapping.

`transformers` spreads it over up to five files: ``tokenizer_config.json``,
``special_tokens_map.json``, ``added_tokens.json``, the model's ``config.json``, and the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from data_pipeline.errors import DataError

Settings = Mapping[str, Any]  # see `read_settings`
Added = tuple[int | None, AddedToken]  # with its id, if a file says which
CONFIG_FILE = "tokenizer_config.json"
ADDED_FILE = "added_tokens.json"
DECODER = "added_tokens_decoder"
# The usual names of each role. The first is used when a token must be added.
ROLES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>", "<cls>"),
    "sep": ("[SEP]", "</s>", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}
# The keys of special tokens, in the order in which `transformers` adds those that are missing.
NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
LISTS = ("additional_special_tokens", "extra_special_tokens")


def read_settings(folder: Path) -> dict[str, Any]:
    """The merged config files of a folder, with the tokens of roles as plain strings.

    `reader` is the class or ``model_type`` by which `transformers` chooses how to read the folder;
    `family` is its model's name in small letters.
    `added_tokens` are all tokens that the files declare, as `Added`. Raises DataError for a file
    that is damaged or says something impossible.
    """
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", CONFIG_FILE):
        settings |= _json_object(folder / name)
    model = _json_object(folder / "config.json")
    readers = (settings.get("tokenizer_class"), *map(model.get, ("tokenizer_class", "model_type")))
    settings["reader"] = str(next(filter(None, readers), ""))
    settings["family"] = _family(settings["reader"])
    settings["added_tokens"] = [*_numbered(settings, folder), *_named(settings, folder)]
    for role in ROLES:
        token = settings.get(f"{role}_token")
        if token is not None:
            settings[f"{role}_token"] = _token(token, folder / CONFIG_FILE, f"{role}_token").content
    return settings


def _family(reader: str) -> str:
    plain = reader.lower().replace("-", "").replace("_", "")
    return plain.removesuffix("fast").removesuffix("tokenizer")


def _numbered(settings: Settings, folder: Path) -> Iterator[Added]:
    """The added tokens with their ids, ascending."""
    tokens = {}
    special = {token.content for _, token in _named(settings, folder)}
    for content, number in _json_object(folder / ADDED_FILE).items():
        is_special = content in special
        token = AddedToken(content, normalized=not is_special, special=is_special)
        tokens[_id(number, folder / ADDED_FILE)] = token
    declared = settings.get(DECODER) or {}
    if not isinstance(declared, dict):
        raise DataError(f"{folder / CONFIG_FILE}: {DECODER} must map ids to tokens")
    for number, token in declared.items():
        where = folder / CONFIG_FILE
        tokens[_id(number, where)] = _token(token, where, DECODER, special=False)
    for number in sorted(tokens):
        yield number, tokens[number]


def _named(settings: Settings, folder: Path) -> Iterator[Added]:
    """The special tokens that have a name or stand in a list."""
    path = folder / CONFIG_FILE
    for name in NAMED:
        if (token := settings.get(f"{name}_token")) is not None:
            yield None, _token(token, path, f"{name}_token")
    for key in LISTS:
        tokens = settings.get(key) or []
        if not isinstance(tokens, list | dict):
            raise DataError(f"{path}: {key} must list tokens")
        for token in tokens.values() if isinstance(tokens, dict) else tokens:
            yield None, _token(token, path, key)


def _token(said: object, path: Path, key: str, special: bool = True) -> AddedToken:
    """A token that is given by its text, or by a mapping with its flags."""
    flags: dict[str, Any] = {"content": said} if isinstance(said, str) else {}
    if isinstance(said, dict):
        flags = {name: value for name, value in said.items() if not name.startswith("__")}
    if not flags.get("content") or not isinstance(flags["content"], str):
        raise DataError(f"{path}: {key} must be a token, not {said}")
    try:
        return AddedToken(**{"special": special, **flags})
    except TypeError:
        raise DataError(f"{path}: {key} must be a token, not {said}") from None


def _id(number: object, path: Path) -> int:
    try:
        return int(str(number))
    except ValueError:
        raise DataError(f"{path}: the id of a token must be a number, not {number!r}") from None


def _json_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise DataError(f"{path}: must hold a JSON object")
    return tree
