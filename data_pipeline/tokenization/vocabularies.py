"""The settings of a tokenizer's folder, and conversion of its vocabulary.

`transformers` spreads the settings over up to five files: ``tokenizer_config.json``,
``special_tokens_map.json``, ``added_tokens.json``, the model's ``config.json``, and the vocabulary.

Each reader returns the tokenizer and the token of each role. Some vocabularies lack roles: GPT-2
has neither a padding nor a mask token. Missing tokens are added after the last id, so that no
other id changes.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from data_pipeline.errors import DataError, as_data_errors
from data_pipeline.tokenization import sentencepiece_models
from data_pipeline.tokenization.sentencepiece_models import ALBERT, FAIRSEQ

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


Roles = dict[str, str]  # "pad" -> "[PAD]", ...
BERT_SETTINGS = {  # -> the attribute of `tokenizers`
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
GPT2_END = "<|endoftext|>"
# Families whose tokenizers separate the texts of a pair by two [SEP], without segment ids.
TWO_SEPARATORS = {"roberta", "xlmroberta", "camembert", "mpnet", "longformer", "bart"}
GENERIC = {"pretrained", "tokenizersbackend"}  # classes of `transformers` that are no model's
BYTE_LEVEL = "byte-level BPE"
# The families whose vocabulary `transformers` reads as this module does, by its kind. Others share
# the files and number, split or normalize otherwise: DeBERTa, XLNet, mBART, T5, BERTweet.
ALIKE = {
    "vocab.txt": {
        *("bert", "distilbert", "electra", "mobilebert", "convbert", "lxmert", "layoutlm"),
        *("squeezebert", "dprquestionencoder", "dprcontextencoder"),
    },
    BYTE_LEVEL: {"roberta", "gpt2", "bart", "led", "longformer", "mvp"},
    "SentencePiece": {ALBERT, *FAIRSEQ},
}
UNNAMED = {"", "tandem", "modernbert", *GENERIC}  # leave it to the vocabulary
SENTENCEPIECE_FILES = (
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
    "tokenizer.model",
)
BYTE_LEVEL_FILES = (
    ("vocab.json", "merges.txt"),
    ("encoder.json", "vocab.bpe"),
    ("gpt2-vocab_hf.json", "gpt2-merges_hf.txt"),
)
BYTE_LEVEL_WORDS = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
)


def bert_tokenizer(
    model: models.Model, lowercase: bool, strip_accents: bool | None = None
) -> tokenizers.Tokenizer:
    """A tokenizer with BERT's normalizer and word splitting.

    BERT strips accents where it folds case; so does `strip_accents` null.
    """
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def byte_level_tokenizer(
    model: models.Model, add_prefix_space: bool = False
) -> tokenizers.Tokenizer:
    """A tokenizer with GPT-2's byte-level alphabet and word splitting."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level_words() -> pre_tokenizers.PreTokenizer:
    """GPT-2's word splitting, with combining marks (``\\p{M}``) as parts of the words they are in.

    GPT-2's pattern has letters alone: it cuts Hindi and Thai words at each vowel sign.
    """
    split = pre_tokenizers.Split(tokenizers.Regex(BYTE_LEVEL_WORDS), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, bytes_])


def from_vocab_txt(path: Path, settings: Settings) -> tuple[tokenizers.Tokenizer, Roles]:
    """A tokenizer from BERT's ``vocab.txt``, which has one WordPiece token per line.

    If the `settings` do not say whether it is cased, it is cased if any word has a capital.
    """
    _require_alike("vocab.txt", path, settings)
    words = _lines(path)
    vocabulary = {word: number for number, word in enumerate(words)}
    unknown = next((name for name in names_of("unk", settings) if name in vocabulary), None)
    if unknown is None:
        raise DataError(f"{path}: has no [UNK] token")
    model = models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100)
    lowercase = not any(word != word.lower() and word[:1] not in "[<" for word in words)
    return complete(with_settings(bert_tokenizer(model, lowercase), settings, path), settings)


def _lines(path: Path) -> list[str]:
    """The lines of a text file, split at line feeds only: a token may hold other line breaks."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not valid UTF-8 at byte {error.start}") from None
    return text.removesuffix("\n").split("\n")


def with_settings(
    tokenizer: tokenizers.Tokenizer, settings: Settings, path: Path
) -> tokenizers.Tokenizer:
    """Add the tokens of the settings, and apply those for BERT's normalizer and for a first space.

    `path` is the file of the vocabulary. `transformers` leaves the space and the normalizer of a
    ``tokenizer.json`` as they are where the config names no model's class.
    """
    with_added_tokens(tokenizer, settings, path)
    prefix = settings.get("add_prefix_space")
    if not isinstance(prefix, bool | None):
        raise DataError(f"{path.parent / CONFIG_FILE}: add_prefix_space must be true or false")
    if settings.get("family") in GENERIC:
        return tokenizer
    if prefix is not None:
        tokenizer = _with_prefix_space(tokenizer, prefix, settings)
    normalizer = tokenizer.normalizer
    if isinstance(normalizer, normalizers.BertNormalizer):
        for key, attribute in BERT_SETTINGS.items():
            value = settings.get(key)
            if not isinstance(value, bool | None):
                raise DataError(f"{path.parent / CONFIG_FILE}: {key} must be true, false or null")
            if value is not None:
                setattr(normalizer, attribute, value)
        tokenizer.normalizer = normalizer
    return tokenizer


def with_added_tokens(tokenizer: tokenizers.Tokenizer, settings: Settings, path: Path) -> None:
    """Add the tokens that config files declare beside a vocabulary; they keep their ids.

    A domain's new words are such tokens. Raises DataError where one would get another id.
    """
    declared = settings.get("added_tokens", ())
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known |= {token.content for number, token in declared if number is not None}
    numbered = [token for number, token in declared if number is not None]
    tokenizer.add_tokens(
        [*numbered, *(token for _, token in declared if token.content not in known)]
    )
    for number, token in declared:
        given = tokenizer.token_to_id(token.content)
        if number is not None and given != number:
            raise DataError(
                f"{path}: the added token {token.content!r} gets the id {given}, but the config "
                f"files beside it say {number}; they belong to another vocabulary"
            )


def _with_prefix_space(
    tokenizer: tokenizers.Tokenizer, prefix: bool, settings: Settings
) -> tokenizers.Tokenizer:
    """The tokenizer that puts a space before a text, or does not.

    A model's class of byte-level BPE replaces a splitting of another form by GPT-2's.
    """
    if settings.get("family") in ALIKE[BYTE_LEVEL]:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
        return tokenizer
    tree = json.loads(tokenizer.to_str())
    splitter = tree["pre_tokenizer"] or {}
    for part in splitter.get("pretokenizers", [splitter]):
        if part.get("type") == "ByteLevel":
            part["add_prefix_space"] = prefix
        elif part.get("type") == "Metaspace":
            part["prepend_scheme"] = "always" if prefix else "never"
    return tokenizers.Tokenizer.from_str(json.dumps(tree))


def byte_level_files(folder: Path) -> tuple[Path, Path] | None:
    """The files of a byte-level BPE in a folder, (vocabulary, merges); None if it has none."""
    for vocabulary, merges in BYTE_LEVEL_FILES:
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            return folder / vocabulary, folder / merges
    return None


def from_byte_level(
    vocabulary: Path, merges: Path, settings: Settings
) -> tuple[tokenizers.Tokenizer, Roles]:
    """A tokenizer from GPT-2's or RoBERTa's byte-level BPE."""
    _require_alike(BYTE_LEVEL, vocabulary, settings)
    with as_data_errors(f"{vocabulary}: not a BPE vocabulary"):
        model = models.BPE.from_file(str(vocabulary), str(merges))
    tokenizer = byte_level_tokenizer(model, bool(settings.get("add_prefix_space")))
    if tokenizer.token_to_id(GPT2_END) is not None:
        tokenizer.add_special_tokens([GPT2_END])
    return complete(with_settings(tokenizer, settings, vocabulary), settings)


def sentencepiece_file(folder: Path) -> Path | None:
    """The SentencePiece model in a folder, if it has one."""
    return next((path for name in SENTENCEPIECE_FILES if (path := folder / name).is_file()), None)


def from_sentencepiece(path: Path, settings: Settings) -> tuple[tokenizers.Tokenizer, Roles]:
    """A tokenizer with the pieces, ids and normalization of a SentencePiece ``.model``."""
    _require_alike("SentencePiece", path, settings)
    tokenizer = sentencepiece_models.read(path.read_bytes(), str(path), settings)
    return complete(with_settings(tokenizer, settings, path), settings)


def _require_alike(kind: str, path: Path, settings: Settings) -> None:
    """Raise DataError where `transformers` would give other ids than this module."""
    if settings.get("family", "") not in ALIKE[kind] | UNNAMED:
        folder = path.parent
        raise DataError(
            f"{path}: transformers' {settings['reader']} reads it in its own way; write its "
            f"tokenizer.json with `AutoTokenizer.from_pretrained({str(folder)!r})"
            f".save_pretrained({str(folder)!r})`"
        )


def complete(
    tokenizer: tokenizers.Tokenizer, settings: Settings
) -> tuple[tokenizers.Tokenizer, Roles]:
    """Find or add the special tokens, and set the post-processor that inserts [CLS] and [SEP]."""
    present = roles_in(tokenizer, settings)
    roles = {
        role: present.get(role, names_of(role, settings)[0])
        for role in ROLES
        if role in present or role != "unk"  # a byte-level vocabulary needs no unknown token
    }
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [token for token in roles.values() if token not in known]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in missing])
    return framed(tokenizer, roles, settings), roles


def roles_in(tokenizer: tokenizers.Tokenizer, settings: Settings) -> Roles:
    """The token of each role that the vocabulary has: the one named, or one with a usual name."""
    roles = {}
    for role in ROLES:
        names = names_of(role, settings)
        known = [name for name in names if tokenizer.token_to_id(name) is not None]
        if known:
            roles[role] = known[0]
    return roles


def framed(
    tokenizer: tokenizers.Tokenizer, roles: Roles, settings: Settings
) -> tokenizers.Tokenizer:
    """The tokenizer, which puts [CLS] and [SEP] around texts."""
    cls, sep = roles["cls"], roles["sep"]
    second = f"$B:1 {sep}:1"
    if settings.get("family") in TWO_SEPARATORS:
        second = f"{sep}:0 $B:0 {sep}:0"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 {second}",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (cls, sep)],
    )
    return tokenizer


def names_of(role: str, settings: Settings) -> tuple[str, ...]:
    """The possible names of a role's token, the likeliest first."""
    declared = settings.get(f"{role}_token")
    return ROLES[role] if declared is None else (str(declared), *ROLES[role])
