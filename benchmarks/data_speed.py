"""Finished batches per second on one core, beside what else there is, in one run.

    python benchmarks/data_speed.py CORPUS [--length 512] [--rows 32] [--tokens 8000000]

CORPUS is a folder made by ``tandem data build``. The others are given the same tokens, cut into
sequences beforehand: one tar sample for each. Times are CPU seconds of this process, which is
pinned to one core, so that other work on the machine disturbs little. Every row is the best of
`REPEATS` runs, taken in turns.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import webdataset
from numpy.typing import NDArray

from data_pipeline import BatchStream, Corpus, CorpusSplit, DataConfig, MaskingConfig

REPEATS = 3

Batches = Generator[int, None, None]  # the number of tokens of each


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8_000_000)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    corpus = Corpus.open(options.corpus)
    split, length, rows = corpus.split("train"), options.length, options.rows
    sequences = slices(split, length, options.tokens)
    with tempfile.TemporaryDirectory() as scratch:
        tar = write_tar(sequences, Path(scratch))
        collator = transformers.DataCollatorForLanguageModeling(
            transformers.AutoTokenizer.from_pretrained(corpus.tokenizer_dir)
        )
        contestants: dict[str, Callable[[], Batches]] = {
            **ours(split, length, rows),
            "webdataset: not packed, not masked": lambda: loader(tar, rows),
            "transformers' collator: masking alone": lambda: collate(sequences, rows, collator),
            "webdataset and collator: what a user has": lambda: both(tar, rows, collator),
        }
        rates = dict.fromkeys(contestants, 0.0)
        for _ in range(REPEATS):
            for name, batches in contestants.items():
                share = 1.0 if name.startswith("tandem") else 0.25
                rates[name] = max(rates[name], rate(batches(), int(options.tokens * share)))
    print(f"| L={length}, {rows} rows, one core | million tokens/s |\n|---|---|")
    for name, tokens_per_second in rates.items():
        print(f"| {name} | {tokens_per_second / 1e6:.1f} |")


def rate(batches: Batches, tokens: int) -> float:
    """Tokens per CPU second over about `tokens` tokens, after a first batch."""
    next(batches)
    done, start = 0, time.process_time()
    for size in batches:
        done += size
        if done >= tokens:
            break
    seconds = time.process_time() - start
    batches.close()  # ends threads that read ahead
    return done / seconds


def ours(split: CorpusSplit, length: int, rows: int) -> dict[str, Callable[[], Batches]]:
    """Batches of this project, by packing and masking."""
    kinds: dict[str, dict[str, Any]] = {
        "tandem: full_sentences, tokens": {},
        "tandem: full_sentences, whole words": {"masking": MaskingConfig(unit="word")},
        "tandem: sop, n-grams": {"packing": "sop", "masking": MaskingConfig(unit="ngram")},
    }

    def stream(options: dict[str, Any]) -> Batches:
        config = DataConfig(path="unused", sequence_length=length, **options)
        batches = BatchStream(split, config, 1, rows)
        for step in itertools.count():
            yield batches.batch(step).input_ids.size

    return {name: partial(stream, options) for name, options in kinds.items()}


def slices(split: CorpusSplit, length: int, tokens: int) -> NDArray[Any]:
    """[sequences, length] consecutive tokens of a corpus."""
    parts, size = [], 0
    for number in range(len(split.index.blocks)):
        parts.append(split.read_block(number).tokens)
        size += len(parts[-1])
        if size >= tokens:
            break
    joined = np.concatenate(parts)
    return joined[: len(joined) // length * length].reshape(-1, length)


def write_tar(sequences: NDArray[Any], folder: Path) -> str:
    """Write one tar sample per sequence, as loaders of sequences expect."""
    path = folder / "sequences.tar"
    with tarfile.open(path, "w") as tar:
        for number, sequence in enumerate(sequences):
            data = io.BytesIO()
            np.save(data, sequence)
            header = tarfile.TarInfo(f"{number:09d}.npy")
            header.size = data.tell()
            data.seek(0)
            tar.addfile(header, data)
    return str(path)


def samples(tar: str) -> webdataset.WebDataset:
    """The sequences of a tar, repeated endlessly."""
    return webdataset.WebDataset(tar, shardshuffle=False).decode().to_tuple("npy").repeat()


def loader(tar: str, rows: int) -> Batches:
    """Plain webdataset: batches of sequences."""
    for (batch,) in samples(tar).batched(rows):
        yield torch.from_numpy(batch.astype(np.int64)).numel()


def collate(sequences: NDArray[Any], rows: int, collator: Callable[..., Any]) -> Batches:
    """Masking by transformers of sequences that are in memory."""
    while True:
        for first in range(0, len(sequences) - rows, rows):
            examples = [{"input_ids": row} for row in sequences[first : first + rows].tolist()]
            yield collator(examples)["input_ids"].numel()


def both(tar: str, rows: int, collator: Callable[..., Any]) -> Batches:
    """Webdataset and transformers' masking."""
    examples = []
    for (sequence,) in samples(tar):
        examples.append({"input_ids": sequence.tolist()})
        if len(examples) == rows:
            yield collator(examples)["input_ids"].numel()
            examples = []


if __name__ == "__main__":
    main()
