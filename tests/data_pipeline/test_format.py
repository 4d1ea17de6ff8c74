"""The corpus on disk, read back by third-party code."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import transformers
import webdataset

from data_pipeline import Corpus
from data_pipeline.shards.blocks import Block, token_dtype
from data_pipeline.shards.index import INDEX_FILES, Index, shard_name
from data_pipeline.shards.writing import SplitWriter
from data_pipeline.text.documents import read_documents


def tokens_by_webdataset(split) -> list[dict]:
    shards = [str(split.folder / shard_name(n)) for n in range(len(split.index.shards))]
    return list(webdataset.WebDataset(shards, shardshuffle=False).decode())


def test_plain_webdataset_reads_every_block(corpus: Corpus) -> None:
    for name in ("train", "val"):
        split = corpus.split(name)
        samples = tokens_by_webdataset(split)
        assert len(samples) == len(split.index.blocks)
        for number, sample in enumerate(samples):
            block = split.read_block(number)
            np.testing.assert_array_equal(sample["tokens.npy"], block.tokens)
            np.testing.assert_array_equal(sample["sentences.npy"], block.sentences)
            np.testing.assert_array_equal(sample["documents.npy"], block.documents)


def test_documents_are_those_of_the_text_with_the_ids_of_transformers(
    corpus: Corpus, text_file: Path, tokenizer_dir: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_dir)
    expected = {
        tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in read_documents([str(text_file)])
    }
    found = set()
    for name in ("train", "val"):
        for sample in tokens_by_webdataset(corpus.split(name)):
            sentences = np.cumsum(sample["sentences.npy"])
            ends = sentences[np.cumsum(sample["documents.npy"]) - 1]
            found |= {tuple(one.tolist()) for one in np.split(sample["tokens.npy"], ends)[:-1]}
    assert found == expected


def test_index_describes_the_shards(corpus: Corpus) -> None:
    split = corpus.split("train")
    counts = np.zeros(corpus.vocab_size, np.int64)
    assert len(split.index.shards) > 1
    for number, record in enumerate(split.index.shards):
        data = (split.folder / shard_name(number)).read_bytes()
        assert len(data) == record["bytes"]
        assert hashlib.sha256(data).digest() == record["sha256"].tobytes()
    for number in range(len(split.index.blocks)):
        counts += np.bincount(split.read_block(number).tokens, minlength=corpus.vocab_size)
    np.testing.assert_array_equal(counts, split.index.token_counts)
    np.testing.assert_array_equal(counts, corpus.token_counts)
    assert counts.sum() == split.index.tokens


def test_wide_ids_and_what_the_format_adds(tmp_path: Path) -> None:
    """32 bits where the vocabulary needs them; less than 1% more than the raw arrays."""
    tokens = np.random.default_rng(0).integers(0, 70_000, 1_000_000).astype(token_dtype(70_000))
    sentences = np.full(len(tokens) // 20, 20, np.uint16)
    writer = SplitWriter(tmp_path, lambda *_: None, 70_000, shard_mb=2.0)
    for part in np.split(np.arange(len(tokens)), 1000):
        writer.add(Block.document(tokens[part], sentences[part[::20] // 20]))
    writer.finish()
    shards = sorted(map(str, tmp_path.glob("*.tar")))
    samples = list(webdataset.WebDataset(shards, shardshuffle=False).decode())
    found = np.concatenate([sample["tokens.npy"] for sample in samples])
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, tokens)
    raw = tokens.nbytes + sentences.nbytes + 4 * 1000
    assert sum(Path(shard).stat().st_size for shard in shards) < 1.01 * raw


def test_tokenizer_folder_loads_with_transformers(corpus: Corpus) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(corpus.tokenizer_dir)
    ids = tokenizer("The old river.", "A stone.")
    vocabulary = corpus.vocabulary
    assert ids["input_ids"][0] == vocabulary.cls
    assert ids["input_ids"].count(vocabulary.sep) == 2
    assert ids["token_type_ids"] == sorted(ids["token_type_ids"])
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (vocabulary.pad, vocabulary.mask)
    assert len(tokenizer) == corpus.vocab_size


def test_a_rank_opens_each_file_of_an_index_once(corpus: Corpus) -> None:
    with mock.patch("builtins.open", wraps=open) as opened:
        index = Index.open(corpus.folder / "train")
    names = Counter(Path(call.args[0]).name for call in opened.call_args_list)
    assert names == dict.fromkeys(INDEX_FILES, 1)
    np.testing.assert_array_equal(index.blocks, np.load(corpus.folder / "train/blocks.npy"))
