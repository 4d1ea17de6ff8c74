"""Pruned vocabularies: what remains, and what `transformers` makes of a text by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer

from configs.errors import OptionError
from data_pipeline import DataError
from data_pipeline.tokenization.pruning import _made_of, prune
from data_pipeline.tokenization.tokenizer import load, save, unknown_id
from data_pipeline.tokenization.training import train
from tests.conftest import tandem
from tests.data_pipeline.conftest import make_documents
from tests.real_data import real_data

TEXT = "\n\n".join(make_documents(40, 7)) + "\n\nA zebra quoted \u201cJ\u00e9sus\u201d.\n"

SIZES = {"wordpiece": 95, "bpe": 320, "unigram": 90}  # fewer entries than the text needs


@pytest.fixture(name="text")
def written(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.fixture(scope="module", params=SIZES)
def folder(request, tmp_path_factory) -> Path:
    """A tokenizer that knows more words than the text has."""
    path = tmp_path_factory.mktemp(request.param)
    more = " ".join(f"{word}ing un{word}" for word in TEXT.split()[::3])
    (path / "in.txt").write_text(f"{TEXT}\n{more}\n{more.upper()}\n" * 2)
    train([str(path / "in.txt")], request.param, 420, str(path / request.param))
    return path / request.param


def read(folder: Path, words: list[str]) -> list[list[str]]:
    """The tokens of each word, by `transformers`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prefix = "" if tokenizer.tokenize("a a") == 2 * tokenizer.tokenize("a") else " "
    texts = tokenizer([prefix + word for word in words], add_special_tokens=False)
    return [tokenizer.convert_ids_to_tokens(ids) for ids in texts["input_ids"]]


def test_transformers_reads_it_and_gives_the_ids_of_the_whole_one(folder, text, tmp_path) -> None:
    pruned = prune(folder, [str(text)], SIZES[folder.name])
    save(pruned.tokenizer, pruned.roles, tmp_path / "pruned")
    whole, ours = load(folder), load(tmp_path / "pruned")
    assert ours[1].vocab_size == len(pruned.kept) <= SIZES[folder.name] < whole[1].vocab_size
    theirs = AutoTokenizer.from_pretrained(tmp_path / "pruned")
    both = TEXT[:900], "A [MASK] zebra"
    for words in ([TEXT], [both[1]], both):
        assert theirs(*words)["input_ids"] == ours[0].encode(*words).ids
    for token, number in ours[0].get_vocab().items():
        assert whole[0].token_to_id(token) == pruned.kept[number]
    for role in ("pad", "cls", "sep", "mask"):
        assert pruned.kept[getattr(ours[1], role)] == getattr(whole[1], role)


def test_words_whose_entries_remain_are_read_as_before(folder, text, tmp_path) -> None:
    """All others are split; the coverage counts them."""
    pruned = prune(folder, [str(text)], SIZES[folder.name])
    save(pruned.tokenizer, pruned.roles, tmp_path / "pruned")
    words = TEXT.split()
    before, after = read(folder, words), read(tmp_path / "pruned", words)
    remaining, unknown = load(tmp_path / "pruned")[0].get_vocab(), pruned.roles.get("unk")
    is_kept = [{*tokens} <= remaining.keys() for tokens in before]
    assert 0 < sum(is_kept) < len(words)
    for kept, old, new in zip(is_kept, before, after, strict=True):
        assert (old == new) == kept
        assert unknown not in new or unknown in old
    told = pruned.coverage
    tokens = [token for word in before for token in word]
    has_entry = [token in remaining and token != unknown for token in tokens]
    assert told.tokens == pytest.approx(sum(has_entry) / len(tokens))
    assert told.split == pytest.approx(1 - sum(is_kept) / len(words))
    lost = [sum(unknown in word for word in made) / len(words) for made in (after, before)]
    assert [told.unknown, told.unknown_before] == pytest.approx(lost)
    lengths = [sum(map(len, made)) / len(words) for made in (after, before)]
    assert [told.tokens_per_word, told.tokens_per_word_before] == pytest.approx(lengths)


def test_the_most_frequent_remain(text, tmp_path) -> None:
    train([str(text)], "wordpiece", 300, str(tmp_path / "whole"))
    tokens = [token for word in read(tmp_path / "whole", TEXT.split()) for token in word]
    for size in (85, 100):
        pruned = prune(tmp_path / "whole", [str(text)], size)
        assert len(pruned.kept) == size
        remaining = pruned.tokenizer.get_vocab()
        longer = {token for token in {*tokens} if len(token.removeprefix("##")) > 1}
        least = min(tokens.count(token) for token in longer & remaining.keys() if token[0] != "[")
        assert all(tokens.count(token) <= least for token in longer - remaining.keys())


def test_a_text_that_has_no_more_leaves_fewer(folder, tmp_path) -> None:
    (tmp_path / "few.txt").write_text("the house\n")
    pruned = prune(folder, [str(tmp_path / "few.txt")], 400)
    assert len(pruned.kept) < 400
    assert pruned.coverage.tokens == 1


def test_mistakes_are_one_line(folder, text, tmp_path) -> None:
    with pytest.raises(OptionError, match=r"--size 9: must be \d+ or more, for the special tokens"):
        prune(folder, [str(text)], 9)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match="holds no words"):
        prune(folder, [str(tmp_path / "empty.txt")], 300)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    refused = tandem("tokenizer", "prune", folder, text, "--size", 300, "--out", tmp_path / "out")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "exists; move it away" in refused.stderr


@pytest.mark.parametrize("name", ["bert-base-uncased", "gpt2"])
def test_published_vocabularies(name, text, tmp_path) -> None:
    folder = real_data("tokenizers", name)
    done = tandem("tokenizer", "prune", folder, text, "--size", 2000, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "100.00% of the text's tokens keep their entry" in done.stdout
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    ours, vocabulary = load(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == ours.encode(TEXT).ids
    assert len(theirs) == vocabulary.vocab_size
    assert (unknown_id(ours) is None) == (name == "gpt2")
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]


@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_an_unknown_token_of_another_name_remains(kind: str, tmp_path: Path) -> None:
    """Pruning ended in a KeyError, or in the first word that the text had not."""
    special, parts = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "strange"], ["hello", "world", *"helo"]
    if kind == "unigram":
        pieces = [*((name, 0.0) for name in special), *((f"\u2581{part}", -1.0) for part in parts)]
        made = tokenizers.Tokenizer(models.Unigram(pieces, special.index("strange")))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        names = [*special, *parts, *(f"##{letter}" for letter in "helo")]
        vocabulary = {name: number for number, name in enumerate(names)}
        made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="strange"))
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("hello hello")
    pruned = prune(tmp_path, [str(tmp_path / "text.txt")], 14).tokenizer
    assert pruned.token_to_id("world") is None
    assert set(pruned.encode("zzz", add_special_tokens=False).ids) == {unknown_id(pruned)}


def test_an_entry_of_many_merges_needs_each_part_once() -> None:
    """Each way to merge a run of 16 signs was followed: 43 million steps."""
    runs = {
        "=" * size: [half for at in range(1, size) for half in ("=" * at, "=" * (size - at))]
        for size in range(2, 41)
    }
    assert _made_of("=" * 40, runs) == {"=" * size for size in range(1, 41)}
