"""Every form of a tokenizer's folder that `transformers` reads gives its ids."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from transformers import AutoTokenizer

from data_pipeline import BatchStream, Corpus, DataConfig, DataError, SourceConfig
from data_pipeline.shards import manifest
from data_pipeline.tokenization.alignment import differing_text
from data_pipeline.tokenization.tokenizer import install, load, read, save, word_starts
from data_pipeline.tokenization.training import train
from tests.data_pipeline.conftest import make_documents

SIZE = 300  # of vocab.txt
Write = Callable[[Path, Path], None]  # (the folder of the trained vocabularies, a new folder)
ROBERTA = {
    **{f"{role}_token": f"<{role}>" for role in ("pad", "unk", "mask")},
    **{f"{role}_token": "<s>" for role in ("bos", "cls")},
    **{f"{role}_token": "</s>" for role in ("eos", "sep")},
}
TEXTS = [
    *make_documents(2, 5),
    "The COVID covid covidish young\u00e9 river, a [NEW1] house and <new> words.",
    "  Leading space, ``quotes'' and a <mask> or [MASK] \u00c9t\u00e9  twice\ttab\nline ",
    "\u4e2d\u6587 half\uff21\uff22 1,000 don't",
]


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory, text_file) -> Path:
    return make_vocabularies(text_file, tmp_path_factory.mktemp("vocabularies"))


def make_vocabularies(text_file: Path, folder: Path) -> Path:
    """vocab.txt, vocab.json with merges.txt, and SentencePiece models, of one small text."""
    train([str(text_file)], "wordpiece", 300, str(folder / "wordpiece"))
    words = load(folder / "wordpiece")[0].get_vocab()
    unused = [f"[unused{number}]" for number in range(SIZE - len(words))]
    lines = [*sorted(words, key=words.__getitem__), *unused]
    (folder / "vocab.txt").write_text("\n".join(lines) + "\n")
    train([str(text_file)], "bpe", 400, str(folder / "bpe"))
    tree = json.loads((folder / "bpe/tokenizer.json").read_text())
    names = dict(zip(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
                     ["<pad>", "<unk>", "<s>", "</s>", "<mask>"], strict=True))  # fmt: skip
    vocabulary = {names.get(key, key): value for key, value in tree["model"]["vocab"].items()}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = [" ".join(pair) for pair in tree["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    control = {"pad_piece": "<pad>", "control_symbols": ["[CLS]", "[SEP]", "[MASK]"]}
    for name, special in (
        ("plain.model", {}),
        ("albert.model", {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, **control}),
    ):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            input=str(text_file), model_writer=model, vocab_size=150, minloglevel=2, **special
        )
        (folder / name).write_bytes(model.getvalue())
    return folder


def folder_of(**files: str | dict) -> Write:
    """Copies vocabularies (names), and writes JSON (mappings), by the name in the new folder."""

    def write(source: Path, folder: Path) -> None:
        folder.mkdir()
        for name, content in files.items():
            path = folder / name.replace("__", ".")
            if isinstance(content, str):
                path.write_bytes((source / content).read_bytes())
            else:
                path.write_text(json.dumps(content), encoding="utf-8")

    return write


def word(content: str, special: bool = False, **flags: bool) -> dict:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": not special}
    return {"content": content, "special": special, **plain, **flags}


BERT = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
BYTES = {"vocab__json": "vocab.json", "merges__txt": "merges.txt"}
ROBERTA_CONFIG = {"tokenizer_class": "RobertaTokenizer", **ROBERTA}
GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast", **ROBERTA}


PREFIX = {"add_prefix_space": True}
OURS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **{f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")},
}


def model_type(name: str) -> dict:
    return {"config__json": {"model_type": name}}


FOLDERS: dict[str, Write] = {
    "bert, added_tokens.json": folder_of(
        vocab__txt="vocab.txt",
        tokenizer_config__json=BERT,
        added_tokens__json={"covid": 301, "[NEW1]": 300},
    ),
    "bert, added_tokens_decoder": folder_of(
        vocab__txt="vocab.txt",
        tokenizer_config__json={
            **BERT,
            "added_tokens_decoder": {"300": word("[NEW1]", True), "301": word("covid")},
        },
    ),
    "bert, single words only": folder_of(
        vocab__txt="vocab.txt",
        tokenizer_config__json={
            **BERT,
            "added_tokens_decoder": {"300": word("covid", single_word=True, normalized=False)},
        },
    ),
    "bert, additional_special_tokens": folder_of(
        vocab__txt="vocab.txt",
        tokenizer_config__json={**BERT, "extra_special_tokens": ["[NEW1]", "<new>"]},
    ),
    "bert by its model_type": folder_of(
        vocab__txt="vocab.txt",
        tokenizer_config__json={"do_lower_case": True},
        **model_type("bert"),
    ),
    "roberta, files": folder_of(**BYTES, tokenizer_config__json=ROBERTA_CONFIG),
    "roberta, add_prefix_space": folder_of(
        **BYTES, tokenizer_config__json={**ROBERTA_CONFIG, "add_prefix_space": True}
    ),
    "roberta, a mask that takes its space": folder_of(
        **BYTES,
        tokenizer_config__json={
            **ROBERTA_CONFIG,
            "mask_token": {"__type": "AddedToken", **word("<mask>", True, lstrip=True)},
        },
    ),
    "roberta, special_tokens_map and added tokens": folder_of(
        **BYTES,
        tokenizer_config__json={"tokenizer_class": "RobertaTokenizer"},
        special_tokens_map__json=ROBERTA,
        added_tokens__json={"<new>": 400, "covid": 401},
    ),
    "tokenizer.json, add_prefix_space of a class": folder_of(
        tokenizer__json="roberta.json",
        tokenizer_config__json={**ROBERTA_CONFIG, "add_prefix_space": True},
    ),
    "tokenizer.json, add_prefix_space of no class": folder_of(
        tokenizer__json="roberta.json",
        tokenizer_config__json={**GENERIC, "add_prefix_space": True},
    ),
    "tokenizer.json, added tokens": folder_of(
        tokenizer__json="roberta.json",
        tokenizer_config__json={**GENERIC, "added_tokens_decoder": {"400": word("covid")}},
    ),
    "tokenizer.json of tandem, add_prefix_space of a class": folder_of(
        tokenizer__json="bpe/tokenizer.json",
        tokenizer_config__json={
            **OURS,
            **PREFIX,
            "tokenizer_class": "GPT2Tokenizer",
            **{"bos_token": "[CLS]", "eos_token": "[SEP]"},
        },
    ),
    "tokenizer.json of tandem, add_prefix_space of no class": folder_of(
        tokenizer__json="bpe/tokenizer.json", tokenizer_config__json={**OURS, **PREFIX}
    ),
    "tokenizer.json of tandem, do_lower_case of no class": folder_of(
        tokenizer__json="wordpiece/tokenizer.json",
        tokenizer_config__json={**OURS, "do_lower_case": False, "strip_accents": True},
    ),
    "albert, only spiece.model": folder_of(spiece__model="albert.model", **model_type("albert")),
    "albert, cased": folder_of(
        spiece__model="albert.model",
        tokenizer_config__json={
            "tokenizer_class": "AlbertTokenizer",
            "do_lower_case": False,
            "keep_accents": True,
        },
    ),
    "xlm-roberta": folder_of(
        sentencepiece__bpe__model="plain.model",
        tokenizer_config__json={"tokenizer_class": "XLMRobertaTokenizer"},
    ),
    "xlm-roberta by its model_type, new words": folder_of(
        sentencepiece__bpe__model="plain.model",
        added_tokens__json={"covid": 152, "<new>": 153},
        **model_type("xlm-roberta"),
    ),
    "camembert": folder_of(
        sentencepiece__bpe__model="plain.model",
        tokenizer_config__json={"tokenizer_class": "CamembertTokenizerFast"},
    ),
}


@pytest.fixture(scope="session", autouse=True)
def _roberta_json(vocabularies) -> None:
    """tokenizer.json of the byte-level vocabulary, with RoBERTa's names."""
    folder = vocabularies / "roberta"
    FOLDERS["roberta, files"](vocabularies, folder)
    load(folder)[0].save(str(vocabularies / "roberta.json"))


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_transformers(tmp_path, vocabularies, name) -> None:
    FOLDERS[name](vocabularies, tmp_path / "folder")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "folder")
    ours, vocabulary = load(tmp_path / "folder")
    assert ours.get_vocab() == theirs.get_vocab()
    right = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert [ours.encode(text, add_special_tokens=False).ids for text in TEXTS] == right
    roles = (theirs.pad_token_id, theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id)
    assert (vocabulary.pad, vocabulary.cls, vocabulary.sep, vocabulary.mask) == roles
    install(tmp_path / "folder", tmp_path / "installed")
    installed = AutoTokenizer.from_pretrained(tmp_path / "installed")
    assert [installed(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == right
    pair, _ = vocabulary.with_special(right[:2])
    if theirs.num_special_tokens_to_add(pair=True):
        assert pair.tolist() == theirs(*TEXTS[:2])["input_ids"]
    assert pair.tolist() == installed(*TEXTS[:2])["input_ids"]


@pytest.mark.parametrize(
    ("file", "source", "reader"),
    [
        ("spm.model", "plain.model", "DebertaV2TokenizerFast"),
        ("spiece.model", "plain.model", "XLNetTokenizer"),
        ("sentencepiece.bpe.model", "plain.model", "MBartTokenizer"),
        ("spiece.model", "plain.model", "t5"),
        ("sentencepiece.bpe.model", "plain.model", "roberta"),
        ("vocab.txt", "vocab.txt", "BertJapaneseTokenizer"),
        ("vocab.txt", "vocab.txt", "mpnet"),
        ("vocab.json", "vocab.json", "DebertaTokenizer"),
    ],
)
def test_what_transformers_reads_otherwise_is_refused(
    tmp_path, vocabularies, file, source, reader
) -> None:
    config = {"tokenizer_class": reader} if reader[0].isupper() else {"model_type": reader}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / file).write_bytes((vocabularies / source).read_bytes())
    (tmp_path / "merges.txt").write_bytes((vocabularies / "merges.txt").read_bytes())
    with pytest.raises(DataError, match=f"{file}: transformers' {reader} reads it") as caught:
        load(tmp_path)
    assert f"AutoTokenizer.from_pretrained('{tmp_path}').save_pretrained" in str(caught.value)


def test_what_transformers_saves_is_read_in_place_of_a_class_of_its_own(
    tmp_path, vocabularies
) -> None:
    folder_of(
        spm__model="plain.model", tokenizer_config__json={"tokenizer_class": "DebertaV2Tokenizer"}
    )(vocabularies, tmp_path / "folder")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "folder")
    theirs.save_pretrained(tmp_path / "folder")
    ours, vocabulary = load(tmp_path / "folder")
    right = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert [ours.encode(text, add_special_tokens=False).ids for text in TEXTS] == right
    assert vocabulary.mask == theirs.mask_token_id


def test_a_folder_without_its_config_is_no_tokenizer(tokenizer_dir, tmp_path, monkeypatch) -> None:
    """One that a killed process began: its tokenizer.json would be read alone."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", killed)
        with pytest.raises(KeyboardInterrupt):
            save(*read(tokenizer_dir), tmp_path)
    with pytest.raises(DataError):
        load(tmp_path)


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "PreTrainedTokenizerFast"}])
def test_a_lone_tokenizer_json_has_its_roles_by_their_usual_names(
    tmp_path, vocabularies, config
) -> None:
    files = {"tokenizer__json": "roberta.json"}
    folder_of(**files, **({"tokenizer_config__json": config} if config else {}))(
        vocabularies, tmp_path / "folder"
    )
    tokenizer, vocabulary = load(tmp_path / "folder")
    names = [vocabulary.pad, vocabulary.cls, vocabulary.sep, vocabulary.mask]
    assert [tokenizer.id_to_token(number) for number in names] == ["<pad>", "<s>", "</s>", "<mask>"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"added_tokens.json": {"covid": 350}}, "'covid' gets the id 300, but .* say 350"),
        ({"added_tokens.json": ["covid"]}, "added_tokens.json: must hold a JSON object"),
        ({"added_tokens.json": {"covid": "x"}}, "the id of a token must be a number"),
        ({"tokenizer_config.json": {"added_tokens_decoder": ["x"]}}, "must map ids to tokens"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"300": 7}}}, "must be a token, not 7"),
        ({"tokenizer_config.json": {"mask_token": {"content": 7}}}, "mask_token"),
        ({"tokenizer_config.json": {"extra_special_tokens": 3}}, "must list tokens"),
        ({"tokenizer_config.json": {"add_prefix_space": "yes"}}, "add_prefix_space must be true"),
    ],
)
def test_what_config_files_cannot_mean_is_one_line(tmp_path, vocabularies, files, message) -> None:
    (tmp_path / "vocab.txt").write_bytes((vocabularies / "vocab.txt").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "post_processor",
    [
        None,
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
        {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
        },
    ],
    ids=["none", "of bytes", "only the first"],
)
def test_a_tokenizer_that_lacks_special_tokens_adds_those_that_training_reads(
    tmp_path: Path, text_file: Path, post_processor: dict | None
) -> None:
    train([str(text_file)], "bpe", 300, str(theirs := tmp_path / "theirs"))
    path = theirs / "tokenizer.json"
    tree = json.loads(path.read_text()) | {"post_processor": post_processor}
    path.write_text(json.dumps(tree))
    install(theirs, out := tmp_path / "out")
    plain, again = (
        AutoTokenizer.from_pretrained(folder)("a b", add_special_tokens=False).input_ids
        for folder in (theirs, out)
    )
    assert plain == again
    for texts in (("a b",), ("a b", "c")):
        tokenizer, vocabulary = load(out)
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        read = AutoTokenizer.from_pretrained(out)(*texts).input_ids
        assert read == vocabulary.with_special(ids)[0].tolist()


@pytest.mark.parametrize("student", ["roberta", "albert", "bert", "modernbert"])
@pytest.mark.parametrize("config", [{}, {"model_max_length": 512}, {"do_lower_case": False}])
def test_a_tokenizer_that_names_no_class_is_not_read_as_that_of_the_exported_model(
    tmp_path: Path, text_file: Path, student: str, config: dict
) -> None:
    train([str(text_file)], "wordpiece", 300, str(source := tmp_path / "source"), cased=True)
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    (source / "config.json").write_text(json.dumps({"model_type": "bert"}))
    install(source, out := tmp_path / "out")
    (out / "config.json").write_text(json.dumps({"model_type": student}))
    ours = load(source)[0]
    theirs = AutoTokenizer.from_pretrained(out)
    right = [ours.encode(text).ids for text in TEXTS]
    assert [theirs(text).input_ids for text in TEXTS] == right
    assert theirs.pad_token == "[PAD]"


def test_an_added_word_begins_a_word(tmp_path, vocabularies) -> None:
    FOLDERS["roberta, special_tokens_map and added tokens"](vocabularies, tmp_path / "folder")
    tokenizer, vocabulary = load(tmp_path / "folder")
    assert word_starts(tokenizer, vocabulary)[[400, 401]].all()
    assert not vocabulary.is_special[401]


def _with_rules(folder: Path, out: Path, **changes: object) -> Path:
    """A copy of a tokenizer.json whose normalizer or pre-tokenizer has other settings."""
    shutil.copytree(folder, out)
    tree = json.loads((out / "tokenizer.json").read_text())
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if name:
            tree[part][name] = value
        else:
            tree[part] = value
    (out / "tokenizer.json").write_text(json.dumps(tree))
    return out


RULES = {
    "wordpiece": [
        {"normalizer__lowercase": False},
        {"normalizer__strip_accents": True},
        {"normalizer__handle_chinese_chars": False},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    ],
    "bpe": [
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            }
        },
        {"normalizer": {"type": "NFKC"}},
    ],
    "unigram": [{"normalizer": {"type": "Lowercase"}}],
}


@pytest.mark.parametrize(
    ("kind", "changes"), [(kind, one) for kind, several in RULES.items() for one in several]
)
def test_rules_differ_though_the_vocabulary_is_one(text_file, tmp_path, kind, changes) -> None:
    train([str(text_file)], kind, 100 if kind == "unigram" else 400, str(tmp_path / "a"))
    other = _with_rules(tmp_path / "a", tmp_path / "b", **changes)
    assert load(tmp_path / "a")[1] == load(other)[1]
    text = differing_text(tmp_path / "a", other)
    assert text is not None
    ids = [load(tmp_path / one)[0].encode(text, add_special_tokens=False).ids for one in "ab"]
    assert ids[0] != ids[1]


def test_other_words_for_one_rule_do_not_differ(text_file, tmp_path) -> None:
    train([str(text_file)], "wordpiece", 400, str(tmp_path / "a"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "a")
    theirs.save_pretrained(tmp_path / "b")
    assert differing_text(tmp_path / "a", tmp_path / "b") is None
    normalizer = json.loads((tmp_path / "a" / "tokenizer.json").read_text())["normalizer"]
    form = {"type": "Sequence", "normalizers": [normalizer]}
    same = _with_rules(tmp_path / "a", tmp_path / "c", normalizer=form)
    assert differing_text(tmp_path / "a", same) is None


def test_a_corpus_is_for_a_tokenizer_of_its_rules(corpus: Corpus, tmp_path: Path) -> None:
    size, own = corpus.vocab_size, corpus.tokenizer_dir
    corpus.require_vocabulary(size, own)
    other = _with_rules(own, tmp_path / "other", normalizer__strip_accents=True)
    with pytest.raises(DataError, match=r"the same vocabulary and other rules than in .*/other"):
        corpus.require_vocabulary(size, other)
    copied = tmp_path / "corpus"
    shutil.copytree(corpus.folder, copied)
    shutil.copy(other / "tokenizer.json", copied / "tokenizer" / "tokenizer.json")
    tree = manifest.read(copied)
    record = manifest.FileRecord.of(copied / "tokenizer" / "tokenizer.json")
    tree["files"]["tokenizer/tokenizer.json"] = dataclasses.asdict(record)
    (copied / "corpus.json").write_text(manifest.render(tree))
    sources = {"a": SourceConfig(str(corpus.folder)), "b": SourceConfig(str(copied))}
    with pytest.raises(DataError, match="built with other rules of its tokenizer than"):
        BatchStream.open(DataConfig(sequence_length=64, mixture=sources), "train", 1, 8)
