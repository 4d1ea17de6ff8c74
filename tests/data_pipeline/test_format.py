"""The corpus on disk, read back by code that is not ours."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import transformers
import webdataset

from data_pipeline import Corpus
from data_pipeline.documents import read_documents
from data_pipeline.index import shard_name


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


def test_tokenizer_folder_loads_with_transformers(corpus: Corpus) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(corpus.tokenizer_dir)
    ids = tokenizer("The old river.", "A stone.")
    vocabulary = corpus.vocabulary
    assert ids["input_ids"][0] == vocabulary.cls
    assert ids["input_ids"].count(vocabulary.sep) == 2
    assert ids["token_type_ids"] == sorted(ids["token_type_ids"])
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (vocabulary.pad, vocabulary.mask)
    assert len(tokenizer) == corpus.vocab_size
