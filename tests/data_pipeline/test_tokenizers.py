"""Every kind of tokenizer, against transformers and sentencepiece on the same text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics

import numpy as np
import pytest
import sentencepiece
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline import BuildOptions, Corpus, DataError, build
from data_pipeline.building.encoding import encode_whole
from data_pipeline.building.merging import documents
from data_pipeline.text.formats import ReadOptions
from data_pipeline.text.sentences import sentence_ends
from data_pipeline.tokenization import training
from data_pipeline.tokenization.tokenizer import load, word_starts
from data_pipeline.tokenization.training import train
from data_pipeline.tokenization.word_encoding import DocumentIds, WordEncoder
from tests.data_pipeline.conftest import make_documents
from tests.real_data import real_data

TEXTS = [
    *make_documents(30, 3),
    "Ünïcödé cafés — “quoted”, isn't it?  Two  spaces.   And [MASK] inside.\nA new line: x2+y2=5!",
    'Dr. Smith met Mr. J. Jones. "Really?" he said. 日本語も。\n\n\nThree line ends.\tA tab.',
    "supercalifragilisticexpialidocious " * 3 + "don't we'll I'm",
]
PROSE = [topics.topics[name] for name in sorted(topics.topics)]
MARKED = ["a \u2581b \u2581 c\u2581", "\u2581x\n\u2581 y", "a <own> b"]


Trained = Callable[[str, bool], Path]  # kind, cased


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Tokenizers trained on real prose, each once per session."""
    text = tmp_path_factory.mktemp("prose") / "text.txt"
    text.write_text("\n\n".join([*PROSE[:60], *TEXTS[-3:]]))

    @functools.cache
    def folder(kind: str, cased: bool) -> Path:
        out = tmp_path_factory.mktemp("trained")
        train([str(text)], kind, 400, str(out), cased=cased)
        return out

    return folder


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    out = tmp_path_factory.mktemp("byte-level")
    train([str(text_file)], "bpe", 300, str(out))
    return out


@pytest.fixture(scope="module")
def unigram(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    out = tmp_path_factory.mktemp("unigram")
    train([str(text_file)], "unigram", 100, str(out))
    return out


@pytest.fixture(scope="module")
def other_spaces(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A SentencePiece model that does not treat tabs and line feeds as spaces."""
    prefix = tmp_path_factory.mktemp("other-spaces") / "own"
    sentencepiece.SentencePieceTrainer.train(
        input=str(text_file), model_prefix=str(prefix), vocab_size=100, minloglevel=2,
        normalization_rule_name="nfkc",
    )  # fmt: skip
    return prefix.with_suffix(".model")


def ids_of_corpus(tokenizer: Path, folder: Path, texts: list[str]) -> tuple[Corpus, list[list]]:
    """The ids of each document in a corpus built with the tokenizer."""
    (folder / "in.txt").write_text("\n####\n".join(texts))
    inputs, reading = [str(folder / "in.txt")], ReadOptions("####")
    build(BuildOptions(inputs, str(tokenizer), reading, val_fraction=0.0), str(folder / "out"))
    corpus = Corpus.open(str(folder / "out"))
    return corpus, [document.tokens.tolist() for document in documents(corpus.split("train"))]


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
@pytest.mark.parametrize("cased", [True, False])
def test_trained_here(tmp_path: Path, trained: Trained, kind: str, cased: bool) -> None:
    corpus, found = ids_of_corpus(trained(kind, cased), tmp_path, TEXTS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(corpus.tokenizer_dir)
    assert len(tokenizer) == corpus.vocab_size <= 400
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert found == expected
    vocabulary = corpus.vocabulary
    names = ("pad", "unk", "cls", "sep", "mask")
    assert [tokenizer.convert_tokens_to_ids(f"[{name.upper()}]") for name in names] == [*range(5)]
    assert tokenizer("a", "b")["input_ids"].count(vocabulary.sep) == 2
    assert tokenizer.mask_token_id == vocabulary.mask
    same = tokenizer("The KING")["input_ids"] == tokenizer("the king")["input_ids"]
    assert same == (not cased)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_the_same_text_gives_the_same_files(tmp_path: Path, trained: Trained, kind: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join([*PROSE[:60], *TEXTS[-3:]]))
    train([str(text)], kind, 400, str(tmp_path / "again"), cased=False)
    files = {path.name: path.read_bytes() for path in trained(kind, False).iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == files


def test_a_wordpiece_alphabet_has_the_most_frequent_characters(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(training, "ALPHABET", 4)
    monkeypatch.setattr(training, "COVERAGE", 0.2)
    (tmp_path / "text.txt").write_text("Émile e cab abc\n\nxyz zyx eel\n")
    train([str(tmp_path / "text.txt")], "wordpiece", 40, str(tmp_path / "out"))
    vocabulary = load(tmp_path / "out")[0].get_vocab()
    assert sorted(vocabulary, key=vocabulary.__getitem__)[5:13] == [
        "a", "b", "c", "e", "##a", "##b", "##c", "##e",
    ]  # fmt: skip


def test_only_wordpiece_is_uncased_by_default(
    tokenizer_dir: Path, byte_level: Path, unigram: Path
) -> None:
    for path in (tokenizer_dir, byte_level, unigram):
        tokenizer, _ = load(path)
        upper, lower = (tokenizer.encode(text).ids for text in ("The KING", "the king"))
        assert (upper == lower) == (path == tokenizer_dir)


def test_unigram_ids_are_those_of_sentencepiece(tmp_path: Path) -> None:
    lines = [line for text in PROSE[:40] for line in text.splitlines() if line.strip()]
    model = tmp_path / "own"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(model), vocab_size=200, minloglevel=2
    )
    tokenizer, vocabulary = load(model.with_suffix(".model"))
    processor = sentencepiece.SentencePieceProcessor(model_file=f"{model}.model")
    for line in [*lines, "Ünïcödé  and   spaces ", "ﬁne ½"]:
        found = tokenizer.encode(line, add_special_tokens=False).ids
        # Runs of one character can be cut in several equally probable ways.
        assert found == processor.encode(line) or sorted(found) == sorted(processor.encode(line))
    assert (vocabulary.cls, vocabulary.sep) == (1, 2)
    assert (vocabulary.pad, vocabulary.mask) == (200, 201)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("unigram", "nmt_nfkc"),
        ("bpe", "identity"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                *(("unigram", "nfkc"), ("unigram", "identity")),
                *(("bpe", "nmt_nfkc"), ("bpe", "nfkc")),
            )
        ),
    ],
)
def test_models_of_sentencepiece_have_its_ids_and_those_of_transformers(
    tmp_path: Path, kind: str, rule: str
) -> None:
    lines = [line for text in PROSE[:40] for line in text.splitlines() if line.strip()]
    model = tmp_path / "own"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(model), vocab_size=300, minloglevel=2,
        model_type=kind, normalization_rule_name=rule, user_defined_symbols=["<own>"],
    )  # fmt: skip
    texts = [*dict.fromkeys(line.strip() for line in [*lines, "caf\u00e9s  and \u4e2d\u4e2d x"])]
    corpus, found = ids_of_corpus(model.with_suffix(".model"), tmp_path, [*texts, *MARKED])
    processor = sentencepiece.SentencePieceProcessor(model_file=f"{model}.model")
    for text, ids in zip(texts, found, strict=False):
        # Runs of one character can be cut in several equally good ways.
        assert ids == processor.encode(text) or sorted(ids) == sorted(processor.encode(text))
    exported = transformers.AutoTokenizer.from_pretrained(corpus.tokenizer_dir)
    expected = [exported(text, add_special_tokens=False)["input_ids"] for text in [*texts, *MARKED]]
    assert found == expected
    own = exported.convert_tokens_to_ids("<own>")
    assert all(
        (own in ids) == ("<own>" in text) for text, ids in zip(MARKED, found[-3:], strict=True)
    )


@pytest.mark.parametrize("kind", ["word", "char"])
def test_other_models_of_sentencepiece_are_refused(tmp_path: Path, kind: str) -> None:
    model = tmp_path / "own"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE[0].splitlines()), model_prefix=str(model), vocab_size=40,
        model_type=kind, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    with pytest.raises(DataError, match=r"own\.model: only unigram and BPE models"):
        load(model.with_suffix(".model"))


BERT_WORDS = [
    *["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The", "king", "##s", "h\u00e9", "he"],
    *["\u4e2d", "\u4e2d\u4e2d", "##\u4e2d", "a\u2028b", "\x85", "x\x0cy", "last"],
]
SETTINGS: list[dict] = [
    {"do_lower_case": True},
    {"do_lower_case": False},
    {"do_lower_case": False, "strip_accents": True},
    {"do_lower_case": True, "strip_accents": False},
    {"do_lower_case": True, "tokenize_chinese_chars": False},
    {"do_lower_case": True, "pad_token": "the", "mask_token": "last"},
]


@pytest.mark.parametrize("settings_", SETTINGS, ids=str)
@pytest.mark.parametrize("written", ["vocab.txt", "vocab.txt with BOM", "tokenizer.json"])
def test_bert_vocabularies_with_settings(tmp_path: Path, written: str, settings_: dict) -> None:
    source = tmp_path / "source"
    source.mkdir()
    words = "\n".join(BERT_WORDS) + "\n"
    (source / "vocab.txt").write_text(words, encoding="utf-8")
    reference = transformers.BertTokenizer(
        vocab={word: number for number, word in enumerate(BERT_WORDS)}, **settings_
    )
    if written == "tokenizer.json":  # the settings count, whatever it says
        other = transformers.BertTokenizer(
            vocab={word: number for number, word in enumerate(BERT_WORDS)},
            do_lower_case=not settings_["do_lower_case"],
        )
        other.save_pretrained(source)
    elif "BOM" in written:
        (source / "vocab.txt").write_text(words, encoding="utf-8-sig")
    config = {"tokenizer_class": "BertTokenizer", **settings_}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    texts = ["The the KINGS h\u00e9 He. \u4e2d\u4e2d last", "a\u2028b \x85 x\x0cy"]
    corpus, found = ids_of_corpus(source, tmp_path, texts)
    assert found == [reference(text, add_special_tokens=False)["input_ids"] for text in texts]
    exported = transformers.AutoTokenizer.from_pretrained(corpus.tokenizer_dir)
    assert found == [exported(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert corpus.vocabulary.pad == reference.pad_token_id
    assert corpus.vocab_size == len(BERT_WORDS)


@pytest.mark.parametrize("name", ["bert-base-uncased", "bert-base-cased"])
def test_bert_vocabularies(tmp_path: Path, name: str) -> None:
    source = real_data("tokenizers", name)
    reference = transformers.BertTokenizer.from_pretrained(
        source, do_lower_case=name.endswith("uncased")
    )
    expected = [reference(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    (tmp_path / "vocabulary").mkdir()
    (tmp_path / "vocabulary" / "vocab.txt").write_bytes((source / "vocab.txt").read_bytes())
    for number, folder in enumerate((source, tmp_path / "vocabulary")):
        (tmp_path / str(number)).mkdir()
        corpus, found = ids_of_corpus(folder, tmp_path / str(number), TEXTS)
        assert found == expected
        exported = transformers.AutoTokenizer.from_pretrained(corpus.tokenizer_dir)
        assert [exported(t, add_special_tokens=False)["input_ids"] for t in TEXTS] == expected
        assert corpus.vocabulary.mask == reference.mask_token_id
        assert corpus.vocab_size == len(reference)


def test_gpt2_vocabulary(tmp_path: Path) -> None:
    source = real_data("tokenizers", "gpt2")
    reference = transformers.GPT2Tokenizer(
        vocab=str(source / "encoder.json"), merges=str(source / "gpt2-merges_hf.txt")
    )
    texts = [text.replace("[MASK]", "mask") for text in TEXTS]  # GPT-2 has no such token
    expected = [reference(text)["input_ids"] for text in texts]
    corpus, found = ids_of_corpus(source, tmp_path, texts)
    assert found == expected
    exported = transformers.AutoTokenizer.from_pretrained(corpus.tokenizer_dir)
    assert [exported(t, add_special_tokens=False)["input_ids"] for t in texts] == expected
    assert corpus.vocab_size == 50257 + 4
    starts = np.load(corpus.folder / "word_starts.npy")
    pieces = exported.tokenize(" unbelievable words")
    marks = [bool(starts[exported.convert_tokens_to_ids(piece)]) for piece in pieces]
    assert marks == [piece.startswith("Ġ") for piece in pieces]


def test_a_part_of_a_long_character_begins_no_word(tmp_path: Path) -> None:
    text = "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd, good morning"  # two Hebrew words
    (tmp_path / "text.txt").write_text("\n\n".join([text] * 3), encoding="utf-8")
    train([str(tmp_path / "text.txt")], "bpe", 270, str(tmp_path / "tokenizer"))
    tokenizer, vocabulary = load(tmp_path / "tokenizer")
    starts = word_starts(tokenizer, vocabulary)
    found = tokenizer.encode(text, add_special_tokens=False)
    begun = {start for id, (start, _) in zip(found.ids, found.offsets, strict=True) if starts[id]}
    assert begun - {0} == {4, 9, 10, 15}  # spaces, the comma


def test_sentencepiece_model_on_its_text(tmp_path: Path) -> None:
    source = real_data("tokenizers", "sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(source / "test_model.model"))
    text = (source / "botchan.txt").read_text(encoding="utf-8-sig")
    lines = [line for line in text.splitlines() if line.strip()]
    _, found = ids_of_corpus(source / "test_model.model", tmp_path, list(dict.fromkeys(lines)))
    assert found == [processor.encode(line.strip()) for line in dict.fromkeys(lines)]


ODD = [
    "a" + " " * 3000 + "b. C",
    "Odd \u200b. \u200b Thing.\n\x01 Next.",
    "A\xa0 b.\xa0\n\nC \x1c! d.\x1c E\u3000\u3000 f.\u2028\n G\r\n\t H.  \t I",
    "e\u0301 =\u0338 !\u0301x \u0301y. \u0301Z\u03a3 \u03a3\u0130. <s>Not[MASK]a tag</s> [ MASK ]",
]


def plain(document: DocumentIds) -> list[list[int]]:
    """The ids of each sentence of a document."""
    parts = np.split(document.tokens, np.cumsum(document.sentences)[:-1])
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
@pytest.mark.parametrize("cased", [True, False])
def test_words_short_and_long_documents_are_cut_alike(
    trained: Trained, kind: str, cased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words are looked up; otherwise sentences are found by lookups, or by all offsets."""
    tokenizer, _ = load(trained(kind, cased))
    texts = [text.strip() for text in [*PROSE[::3], *TEXTS, *ODD]]
    ends = [sentence_ends(text) for text in texts]
    words = WordEncoder(tokenizer)(texts, ends)
    assert sum(one is not None for one in words) >= len(texts) - 8
    short = list(encode_whole(tokenizer, texts, ends))
    monkeypatch.setattr("data_pipeline.building.encoding.LOOKUP_TOKENS", 0)
    long = list(encode_whole(tokenizer, texts, ends))
    for text, by_words, by_lookups, by_offsets in zip(texts, words, short, long, strict=True):
        assert plain(by_lookups) == plain(by_offsets), text
        assert by_words is None or plain(by_words) == plain(by_lookups), text


ALPHABET = (
    "aB\u2581\u00e9\u0301 \n\t\r\xa0\x1c\u200b.!'[]MASK\u4e2d\u0130\u03a31\u00b4\u0600\u0e33\uff9e"
)


load_once = functools.cache(load)


@given(st.lists(st.text(ALPHABET, max_size=40).map(str.strip).filter(bool), max_size=5))
@settings(max_examples=100)
def test_words_make_the_text(
    byte_level: Path, unigram: Path, other_spaces: Path, tokenizer_dir: Path, texts: list[str]
) -> None:
    """Looked up word by word, any text gets the same ids as in one piece."""
    ends = [sentence_ends(text) for text in texts]
    for path in (byte_level, unigram, other_spaces, tokenizer_dir):
        tokenizer, _ = load_once(path)
        whole = list(encode_whole(tokenizer, texts, ends))
        for found, expected in zip(WordEncoder(tokenizer)(texts, ends), whole, strict=True):
            assert found is None or plain(found) == plain(expected)


def test_a_full_table_forgets_the_rarer_words(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.tokenization.word_encoding.CACHED_WORDS", 10)
    tokenizer, _ = load(tokenizer_dir)
    encoder = WordEncoder(tokenizer)
    for text in TEXTS[:5]:
        (found,) = encoder([text.strip()], [sentence_ends(text.strip())])
        assert found is not None
        assert found.tokens.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_mask_takes_the_space_before_it_along(tmp_path: Path, text_file: Path) -> None:
    train([str(text_file)], "bpe", 300, str(tmp_path))
    ids = load(tmp_path)[0].encode("the [MASK] house", add_special_tokens=False).ids
    parts = [load(tmp_path)[0].encode(one).ids[1:-1] for one in ("the", "[MASK]", " house")]
    assert ids == [number for part in parts for number in part]
