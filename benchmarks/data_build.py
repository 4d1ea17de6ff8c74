"""Building speed: a whole build beside the tokenizer's library alone, on the same cores.

    python benchmarks/data_build.py TEXT TOKENIZER [--cores 1 2] [--repeats 3]

TEXT is a plain text file. "Alone" is the library's own call for many texts, with as many threads
as there are cores: `encode_batch_fast` of `tokenizers`, for a SentencePiece ``.model`` `encode` of
`sentencepiece` too. The documents are in memory, and the ids are dropped. The build reads the file,
splits sentences, encodes, finds duplicates and writes shards and index, with as many workers as
cores; its time includes starting its processes. Each measurement is a process of its own, limited
to that many cores. The measurements take turns, and the medians are printed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

from data_pipeline import BuildOptions, build
from data_pipeline.text.documents import CHUNK_BYTES, read_documents
from data_pipeline.tokenization import tokenizer as tokenization


@dataclass(frozen=True)
class Took:
    """Wall-clock and CPU seconds, including child processes."""

    wall: float
    cpu: float


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("tokenizer")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    megabytes = os.path.getsize(options.text) / 1e6
    contestants: dict[str, Callable[..., Took]]
    contestants = {"tokenizers alone": tokenizers_alone, "tandem data build": whole_build}
    if options.tokenizer.endswith(".model"):
        contestants = {"sentencepiece alone": sentencepiece_alone, **contestants}
    print("| cores | | MB/s by the clock | MB per CPU second | of the first, clock | CPU |")
    print("|---|---|---|---|---|---|")
    for cores in options.cores:
        medians = measured(contestants, options, cores)
        first = next(iter(medians.values()))
        for name, took in medians.items():
            print(
                f"| {cores} | {name} | {megabytes / took.wall:.2f} | {megabytes / took.cpu:.2f} "
                f"| {first.wall / took.wall:.2f} | {first.cpu / took.cpu:.2f} |",
                flush=True,
            )


def measured(
    contestants: dict[str, Callable[..., Took]], options: argparse.Namespace, cores: int
) -> dict[str, Took]:
    """The medians of each contestant."""
    found: dict[str, list[Took]] = {name: [] for name in contestants}
    for _ in range(options.repeats):
        for name, contestant in contestants.items():
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                job = process.submit(contestant, options.text, options.tokenizer, cores)
                found[name].append(job.result())
    return {
        name: Took(
            statistics.median(one.wall for one in all_), statistics.median(one.cpu for one in all_)
        )
        for name, all_ in found.items()
    }


def tokenizers_alone(text: str, tokenizer_dir: str, cores: int) -> Took:
    """Encode all documents with the library, in parts as large as the build's."""
    keep_to(cores)
    tokenizer, _ = tokenization.load(Path(tokenizer_dir))
    parts = in_parts(text)
    return clocked(
        lambda: [
            [one.ids for one in tokenizer.encode_batch_fast(part, add_special_tokens=False)][:0]
            for part in parts
        ]
    )


def sentencepiece_alone(text: str, model: str, cores: int) -> Took:
    """Encode all documents with `sentencepiece`."""
    keep_to(cores)
    library: Any = importlib.import_module("sentencepiece")
    processor = library.SentencePieceProcessor(model_file=model)
    parts = in_parts(text)
    return clocked(lambda: [processor.encode(part, num_threads=cores)[:0] for part in parts])


def whole_build(text: str, tokenizer_dir: str, cores: int) -> Took:
    """A complete build."""
    keep_to(cores)

    def whole() -> None:
        build(BuildOptions([text], tokenizer_dir), f"{folder}/corpus", workers=cores)
        # What the server of the processes and these have used is known once it has ended.
        forkserver._forkserver._stop()  # type: ignore[attr-defined]

    with tempfile.TemporaryDirectory() as folder:
        return clocked(whole)


def keep_to(cores: int) -> None:
    """Restrict this process and its children to this many cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def in_parts(text: str) -> list[list[str]]:
    """The documents of a file, in lists with about as many characters as the build's chunks."""
    parts: list[list[str]] = [[]]
    size = 0
    for document in read_documents([text]):
        parts[-1].append(document)
        size += len(document)
        if size >= CHUNK_BYTES * len(parts):
            parts.append([])
    return parts


def clocked(work: Callable[[], object]) -> Took:
    """The time that some work takes."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    work()
    return Took(time.perf_counter() - wall, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    """CPU time of this process and of its finished children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
