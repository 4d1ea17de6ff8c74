"""Finished batches per second on one core, beside what else there is, in one run.

    python benchmarks/data_speed.py CORPUS [--length 512] [--rows 32] [--tokens 8000000]

CORPUS is a folder made by ``tandem data build``. The others are given the same tokens, cut into
sequences beforehand: one tar sample for each (`mosaicml-streaming`, if it is installed: one of its
own samples). Times are CPU seconds of this process, which is
pinned to one core, so that other work on the machine disturbs little. Every row is the best of
`REPEATS` runs, taken in turns.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import io
import os
import sys
import tarfile
import tempfile
import time
import types
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
            **mosaic(sequences, rows, Path(scratch) / "mds"),
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
        "tandem: contiguous, tokens": {"packing": "contiguous"},
        "tandem: segment_pair, tokens": {"packing": "segment_pair"},
        "tandem: full_sentences, whole words": {"masking": MaskingConfig(unit="word")},
        "tandem: sop, n-grams": {"packing": "sop", "masking": MaskingConfig(unit="ngram")},
        "tandem: full_sentences, smoothed": {"masking": MaskingConfig(smoothing=0.7)},
    }

    def stream(options: dict[str, Any]) -> Batches:
        config = DataConfig(path="unused", sequence_length=length, **options)
        found = BatchStream(split, config, 1, rows)
        step = 0
        while True:
            yield found.batch(step).input_ids.size
            step += 1

    return {name: partial(stream, options) for name, options in kinds.items()}


def slices(split: CorpusSplit, length: int, tokens: int) -> NDArray[Any]:
    """[sequences, length] consecutive tokens of a corpus."""
    found, size = [], 0
    for number in range(len(split.index.blocks)):
        found.append(split.read_block(number).tokens)
        size += len(found[-1])
        if size >= tokens:
            break
    joined = np.concatenate(found)
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


def mosaic(sequences: NDArray[Any], rows: int, folder: Path) -> dict[str, Callable[[], Batches]]:
    """mosaicml-streaming with a DataLoader over the same sequences, where it is installed."""
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms.functional"):
        # streaming imports torchvision for images, and there is none for every torch.
        stand_in: Any = sys.modules.setdefault(name, types.ModuleType(name))
        stand_in.__spec__ = importlib.machinery.ModuleSpec(name, None)
        stand_in.VisionDataset = stand_in.to_tensor = object
    try:
        streaming = importlib.import_module("streaming")
    except ImportError as error:
        print(f"mosaicml-streaming is left out: {error}", file=sys.stderr)
        return {}
    columns = {"tokens": f"ndarray:{sequences.dtype.name}:{sequences.shape[1]}"}
    with streaming.MDSWriter(out=str(folder), columns=columns) as writer:
        for sequence in sequences:
            writer.write({"tokens": sequence})
    dataset = streaming.StreamingDataset(local=str(folder), batch_size=rows)

    def batches() -> Batches:
        while True:
            for batch in torch.utils.data.DataLoader(dataset, batch_size=rows):
                yield batch["tokens"].long().numel()

    return {"mosaicml-streaming, DataLoader: not packed, not masked": batches}


def collate(sequences: NDArray[Any], rows: int, collator: Callable[..., Any]) -> Batches:
    """Masking by transformers of sequences that are in memory."""
    while True:
        for first in range(0, len(sequences) - rows, rows):
            examples = [{"input_ids": one} for one in sequences[first : first + rows].tolist()]
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
