"""Building a corpus: documents -> token ids with sentence boundaries -> shards and index.

What a corpus folder looks like::

    corpus.json            format, vocabulary facts, counts, a SHA-256 of each file (`manifest`);
                           written last: then it is complete
    tokenizer/             a copy of the tokenizer, loadable with transformers.AutoTokenizer
    word_starts.npy        bool [vocabulary], whether a token begins a word
    train/shard-000000.tar ...   see `data_pipeline.shards.blocks`
    near_duplicates.jsonl  where these are dropped: which ones, and what they are like
    train/{shards,blocks,token_counts}.npy, sentences.u16, documents.u32
                           see `data_pipeline.shards.index`
    val/                   the same, for the documents held out by their hash

The main process reads, tokenizes and writes; the other workers only tokenize. Chunks come back in
order, so the bytes do not depend on the number of workers. Every `JOURNAL_SECONDS` the build saves
its state in ``.build/``. If the build is killed, the same command resumes from there. A build
replaces and removes only files that its journal lists (`data_pipeline.building.journal`).
"""

import hashlib
import itertools
import json
import os
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import OptionError
from data_pipeline.building.encoding import EncodedChunk, encode_all, held_out
from data_pipeline.building.finishing import finish_folder
from data_pipeline.building.journal import JOURNAL, Claims, Journal, alone_in
from data_pipeline.building.near_duplicates import LIST, SIGNATURES, NearDuplicates, records_in
from data_pipeline.errors import DataError
from data_pipeline.reading.corpus import SPLITS
from data_pipeline.remote import is_remote
from data_pipeline.shards import manifest
from data_pipeline.shards.blocks import BLOCK_BYTES, SHARD_MB, Block, offsets
from data_pipeline.shards.manifest import DIGESTS, MANIFEST
from data_pipeline.shards.writing import SplitWriter
from data_pipeline.text.documents import (
    PROBLEMS_SHOWN,
    RawChunk,
    location_of,
    raw_chunks,
    require_usable,
    slice_of,
)
from data_pipeline.text.formats import FileSpan, ReadOptions, find_inputs
from data_pipeline.text.text_files import STDIN
from data_pipeline.tokenization import tokenizer as tokenization
from data_pipeline.tokenization.comparison import NormalizationLoss

JOURNAL_SECONDS = 20.0
PARTS = "parts"
TEXT = "text"  # in the identity of a part: what it is a slice of
HISTOGRAM_LIMITS = [1 << power for power in range(4, 21)]


@dataclass(frozen=True)
class BuildOptions:
    """The inputs and settings of a build; two builds with equal options give equal bytes.

    Next-sentence pairs draw their negatives from a few blocks, so a block should hold many
    documents. A build makes slice `task` of `tasks`; slices may be numbered from 0 or from 1.
    """

    inputs: Sequence[str]
    tokenizer_dir: str
    reading: ReadOptions = field(default_factory=ReadOptions)
    shard_mb: float = SHARD_MB
    block_bytes: int = BLOCK_BYTES  # of its token ids
    val_fraction: float = 0.01
    drop_duplicates: bool = True
    near_duplicates: float | None = None  # drop documents at least this similar to an earlier one
    skip_problems: bool = True
    task: int = 0
    tasks: int = 1
    also: Sequence[str] = ()  # folders of tokenizers that read the same text too

    def __post_init__(self) -> None:
        if not self.inputs:
            raise OptionError("TEXT: name at least one file or folder")
        if not 0.0 <= self.val_fraction < 1.0:
            raise OptionError("--val-fraction: must be at least 0 and less than 1")
        if self.near_duplicates is not None and not 0.5 <= self.near_duplicates <= 1.0:
            raise OptionError("--near-duplicates: must be from 0.5 to 1, such as 0.8")
        if self.near_duplicates is not None and not self.drop_duplicates:
            raise OptionError("--keep-duplicates: --near-duplicates drops these too; remove one")
        if not 0.0 < self.shard_mb <= 1e9:
            raise OptionError("--shard-mb: must be positive, and at most 1e9")
        if not 0 <= self.task <= self.tasks or self.tasks < 1:
            wrong = f"--task {self.task}/{self.tasks}"
            raise OptionError(f"{wrong}: must be I/N with I from 0 to N-1, or 1 to N")
        # Slice N of N is slice 0: counting from 0 and from 1 both cover every slice once.
        object.__setattr__(self, "task", self.task % self.tasks)


@dataclass
class Tally:
    """The counts of a build so far."""

    chunks: int = 0
    documents: int = 0
    duplicates: int = 0
    near_duplicates: int = 0
    problems: int = 0
    characters: int = 0
    characters_by_script: dict[str, int] = field(default_factory=dict)
    removed_by_script: dict[str, int] = field(default_factory=dict)  # by the normalizer
    input_crc32: int = 0  # of the raw input, and of the values of Parquet's column
    first_problems: list[str] = field(default_factory=list)  # at most PROBLEMS_SHOWN
    skipped_files: int = 0  # of folders
    first_skipped: list[str] = field(default_factory=list)  # at most PROBLEMS_SHOWN
    tokenizers: list[dict[str, Any]] = field(default_factory=list)  # the others, once finished
    # A histogram: documents below 16, 32, ... 2**20 tokens, and all larger ones.
    tokens_per_document: list[int] = field(
        default_factory=lambda: [0] * (len(HISTOGRAM_LIMITS) + 1)
    )

    @property
    def loss(self) -> NormalizationLoss:
        """The counts by script, to be added to."""
        return NormalizationLoss(self.characters_by_script, self.removed_by_script)

    def count(self, tokens: int) -> None:
        """Count one document with this number of tokens."""
        self.documents += 1
        self.tokens_per_document[bisect_right(HISTOGRAM_LIMITS, tokens)] += 1

    def require_usable(self, inputs: Sequence[str]) -> None:
        """Raise DataError unless most documents of the inputs could be read."""
        first = next(iter(self.first_problems), None)
        usable = self.documents + self.duplicates + self.near_duplicates
        require_usable(inputs, usable, self.problems, first)


@dataclass(frozen=True)
class Progress:
    """The progress of a build."""

    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int


def build(
    options: BuildOptions,
    out: str,
    workers: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Build a corpus in `out` from text, or resume an interrupted build there.

    `data_pipeline.building.merging.merge` joins the slices of several tasks. Returns the content of
    `corpus.json`. Raises DataError for missing or empty inputs, an unusable tokenizer, a full disk,
    or a folder that holds another corpus.
    """
    if workers < 1:
        raise OptionError(f"--workers {workers}: must be at least 1")
    if is_remote(out):
        raise OptionError(
            f"--out {out}: must be a folder of this machine; copy it there afterwards"
        )
    folder = Path(out)
    if options.tasks > 1:
        if (folder / MANIFEST).exists():
            raise DataError(f"{folder}: already holds a corpus; choose another --out or remove it")
        folder = part_folder(folder, options.task, options.tasks)
    return _Build(options, folder).run(workers, on_progress)


def part_folder(out: Path, task: int, tasks: int) -> Path:
    """The folder in which task `task` (from 0) of `tasks` builds its part."""
    return out / PARTS / f"{task:05d}-of-{tasks:05d}"


class _Build:
    """One build: its options, writers, counts and the documents already seen."""

    def __init__(self, options: BuildOptions, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.tokenizer, self.vocabulary = tokenization.load(Path(options.tokenizer_dir))
        self.also = [tokenization.load(Path(path))[0] for path in options.also]
        # This checks every input before anything is written.
        inputs = find_inputs(options.inputs, options.reading)
        self.share = slice_of(inputs.spans, options.reading, options.task, options.tasks)
        self.places = {span: number for number, span in enumerate(self.share)}
        self.starts = [*itertools.accumulate((span.bytes for span in self.share), initial=0)]
        self.identity = {
            **_identity(options, self.vocabulary.fingerprint, self.share),
            "tokenizer": tokenization.digest(self.tokenizer),
        }
        if self.also:
            self.identity["also"] = [*map(tokenization.digest, self.also)]
        if options.tasks > 1:
            self.identity[TEXT] = _digest_of_sizes(inputs.spans)
        skipped = len(inputs.skipped), inputs.skipped[:PROBLEMS_SHOWN]
        self.tally = Tally(skipped_files=skipped[0], first_skipped=skipped[1])
        self.seen: set[bytes] = set()
        threshold = options.near_duplicates
        self.near = None if threshold is None else NearDuplicates(threshold)

    def run(self, workers: int, on_progress: Callable[[Progress], None] | None) -> dict[str, Any]:
        """Complete the build, unless it is complete already."""
        finished = self._finished()
        if finished is None:
            Claims(self.folder).refuse_foreign_files()
            with alone_in(self.folder / JOURNAL):
                finished = self._finished()  # another process may have completed it meanwhile
                finished = finished or self._build(workers, on_progress)
        Claims(self.folder).remove_journal()
        return finished

    def _build(
        self, workers: int, on_progress: Callable[[Progress], None] | None
    ) -> dict[str, Any]:
        self.claims = Claims(self.folder)
        self.journal = Journal(self.folder / JOURNAL, self.identity)
        self.claims.add(*self.journal.files)
        self.writers = {split: self._writer(split) for split in SPLITS}
        self._resume()
        saved = time.monotonic()
        reading, signs = self.options.reading, self.near is not None
        arguments = self.tokenizer, self.vocabulary, reading, signs, self.also
        for chunk, encoded in encode_all(self._remaining(), arguments, workers):
            self.tally.input_crc32 = _checksum([chunk], self.tally.input_crc32)
            if encoded.records is not None:
                encoded.records["file"] = self.places[chunk.span]
            self._take(encoded)
            if on_progress:
                on_progress(self._progress(chunk))
            if time.monotonic() - saved > JOURNAL_SECONDS:
                self._save()
                saved = time.monotonic()
        return self._finish()

    def _writer(self, split: str) -> SplitWriter:
        return SplitWriter(
            self.folder / split,
            self.claims.add,
            self.vocabulary.vocab_size,
            self.options.shard_mb,
            self.options.block_bytes,
        )

    def _finished(self) -> dict[str, Any] | None:
        if not (self.folder / MANIFEST).exists():
            return None
        tree = manifest.read(self.folder)
        # Corpora that were built before the identity had a digest of the tokenizer count as equal.
        identity = {"tokenizer": self.identity["tokenizer"], **tree.get("identity", {})}
        if identity != self.identity or self._has_other_text(tree["tally"]):
            raise DataError(
                f"{self.folder}: already holds another corpus; choose another --out or remove it"
            )
        return tree

    def _has_other_text(self, tally: dict[str, Any]) -> bool:
        """Whether the input differs from the text that was built.

        Name and size do not identify text. Its checksum is compared where it may have changed.
        """
        built = (self.folder / MANIFEST).stat().st_mtime_ns
        if not any(_may_have_changed(span.path, built) for span in self.share):
            return False
        text = raw_chunks(self.share, self.options.reading)
        return _checksum(text) != tally["input_crc32"]

    def _resume(self) -> None:
        loaded = self.journal.load()
        if loaded is None:
            self.claims.remove_files()
            return
        self.tally = Tally(**loaded.tally)
        self.seen = loaded.digests
        for record in records_in(loaded.signatures):
            self._is_kept(record)
        for split, state in loaded.states.items():
            self.writers[split].restore(state, self.journal.advice)

    def _save(self) -> None:
        states = {split: writer.state for split, writer in self.writers.items()}
        self.journal.save(asdict(self.tally), states)

    def _remaining(self) -> Iterator[RawChunk]:
        """The chunks that are not built yet. Raises DataError if the text before them changed."""
        chunks = raw_chunks(self.share, self.options.reading)
        before = itertools.islice(chunks, self.tally.chunks)
        if _checksum(before) != self.tally.input_crc32:
            raise DataError(
                f"{self.folder}: holds an unfinished build of other text than "
                f"{', '.join(self.options.inputs)} holds now; remove the folder and build again"
            )
        yield from chunks

    def _take(self, chunk: EncodedChunk) -> None:
        """Hand each new document of a chunk to the writer of its split."""
        tally = self.tally
        sentence = offsets(chunk.documents)
        token = offsets(chunk.sentences)[sentence]
        for number, name in enumerate(chunk.digests):
            if self.options.drop_duplicates:
                if name in self.seen:
                    tally.duplicates += 1
                    continue
                self.seen.add(name)
                self.journal.note(DIGESTS, name)
            if chunk.records is not None:
                self.journal.note(SIGNATURES, chunk.records[number].tobytes())
                if not self._is_kept(chunk.records[number]):
                    tally.near_duplicates += 1
                    continue
            split = "val" if held_out(name, self.options.val_fraction) else "train"
            document = Block.document(
                chunk.tokens[token[number] : token[number + 1]],
                chunk.sentences[sentence[number] : sentence[number + 1]],
                chunk.others[number],
            )
            self.writers[split].add(document)
            tally.count(int(token[number + 1] - token[number]))
        tally.characters += chunk.characters
        tally.loss.add(chunk.loss)
        tally.chunks += 1
        self._report(chunk)

    def _is_kept(self, record: np.void) -> bool:
        """Whether no earlier document is like this one. The merge decides it for a part."""
        assert self.near is not None
        path = self.identity["files"][record["file"]][0]
        return self.options.tasks > 1 or self.near.is_new(record, path)

    def _report(self, chunk: EncodedChunk) -> None:
        for problem in chunk.problems:
            self.tally.problems += 1
            if self.options.skip_problems and len(self.tally.first_problems) >= PROBLEMS_SHOWN:
                continue
            line = f"{location_of(problem)}: {problem.reason}"
            if not self.options.skip_problems:
                raise DataError(line)
            self.tally.first_problems.append(line)

    def _progress(self, chunk: RawChunk) -> Progress:
        tokens = sum(writer.tokens for writer in self.writers.values())
        done = self.starts[self.places[chunk.span]] + chunk.consumed
        return Progress(done, self.starts[-1], self.tally.documents, tokens)

    def _finish(self) -> dict[str, Any]:
        for writer in self.writers.values():
            writer.finish()
        if self.options.tasks == 1:
            self.tally.require_usable(self.options.inputs)
        if self.options.tasks > 1:
            for log in (DIGESTS, SIGNATURES) if self.near else (DIGESTS,):
                self.claims.add(self.folder / log)
                self.journal.keep(log)
        elif self.near:
            self.claims.add(self.folder / LIST)
            self.near.write(self.folder / LIST)
        return finish_folder(
            self.folder,
            self.claims.add,
            self.options.tokenizer_dir,
            self.identity,
            (self.tokenizer, self.vocabulary),
            asdict(self.tally),
            other_tokenizers=[*map(Path, self.options.also)],
        )


def _identity(options: BuildOptions, fingerprint: str, share: Sequence[FileSpan]) -> dict[str, Any]:
    """The facts that must agree for a build to resume, or to equal a finished one."""
    tree = asdict(options)
    del tree["tokenizer_dir"], tree["inputs"], tree["also"]
    if options.near_duplicates is None:
        del tree["near_duplicates"]  # equal to a corpus from before this option
    files = [[_full_path(span.path), span.start, span.bytes] for span in share]
    return {**tree, "files": files, "vocabulary": fingerprint}


def _digest_of_sizes(files: Sequence[FileSpan]) -> str:
    """Identifies the files that parts are slices of; their folder may differ from node to node."""
    sizes = [[Path(file.path).name, file.size] for file in files]
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()


def _checksum(chunks: Iterable[RawChunk], before: int = 0) -> int:
    """CRC-32 of raw text, continued from `before`."""
    for chunk in chunks:
        data = chunk.data if isinstance(chunk.data, bytes) else repr(chunk.data).encode()
        before = zlib.crc32(data, before)
    return before


def _may_have_changed(path: str, since: int) -> bool:
    """Whether an input may have been written or replaced `since` (ns).

    Standard input and files elsewhere always may. The time of change is compared: a file that was
    moved here keeps an older time of writing.
    """
    return path == STDIN or is_remote(path) or os.stat(path).st_ctime_ns >= since


def _full_path(path: str) -> str:
    return path if path == STDIN or is_remote(path) else os.path.abspath(path)
