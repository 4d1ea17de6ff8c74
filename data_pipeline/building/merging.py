"""Joining the parts that the tasks of an array built: ``tandem data merge``.

The result holds the same documents in the same order as a single-process build. Shards are not
copied but renamed into one numbering. A part that holds a duplicate of a document in an earlier
part is rewritten without it.
"""

import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.building import journal
from data_pipeline.building.build import PARTS, TEXT, Tally, part_folder
from data_pipeline.building.encoding import DIGEST_BYTES, held_out
from data_pipeline.building.finishing import finish_folder
from data_pipeline.building.journal import Claims
from data_pipeline.building.near_duplicates import LIST, SIGNATURES, NearDuplicates, records_in
from data_pipeline.errors import DataError
from data_pipeline.reading.corpus import SPLITS, Corpus, CorpusSplit, other_tokenizer
from data_pipeline.shards import manifest
from data_pipeline.shards.blocks import Block, OtherTokens, joined, offsets
from data_pipeline.shards.index import (
    DOCUMENTS,
    INDEX_FILES,
    SENTENCES,
    Index,
    shard_name,
    write_index,
)
from data_pipeline.shards.manifest import DIGESTS, MANIFEST
from data_pipeline.shards.writing import SplitWriter, disk_errors
from data_pipeline.text.documents import PROBLEMS_SHOWN
from data_pipeline.tokenization import tokenizer as tokenization


def merge(folder: str) -> dict[str, Any]:
    """Join the parts under `folder` into a corpus there. Returns the content of `corpus.json`.

    The same command resumes an interrupted merge. Raises DataError if a part is missing,
    unfinished or built with other options.
    """
    out = Path(folder)
    if (out / MANIFEST).exists():
        tree = manifest.read(out)
        if next((out / PARTS).glob("*-of-?????/*/shard-*.tar"), None):  # not moved yet
            raise DataError(f"{out}: holds both a corpus and parts; move the parts elsewhere")
    else:
        if not any((out / PARTS).glob("*-of-?????*")):
            raise DataError(
                f"{out}: holds no {PARTS}; build them with `tandem data build --task I/N`"
            )
        Claims(out).refuse_foreign_files()
        with journal.alone_in(out / journal.JOURNAL):
            tree = _merge(out)
    _remove_parts(out / PARTS)
    Claims(out).remove_journal()
    return tree


def _merge(out: Path) -> dict[str, Any]:
    parts = _parts(out)
    trees = [manifest.read(part) for part in parts]
    _require_alike(parts, trees)
    for part, tree in zip(parts, trees, strict=True):
        journal.refuse_foreign_files_in_corpus(part)
        manifest.verify(part, manifest.files_of(tree), up_to=math.inf)
    threshold = trees[0]["identity"].get("near_duplicates")
    near = None if threshold is None else NearDuplicates(threshold)
    if trees[0]["identity"]["drop_duplicates"]:
        _drop_duplicates(parts, near)
    trees = [manifest.read(part) for part in parts]
    tally = _joined_tally(trees)
    tally.require_usable([str(out)])
    claims = Claims(out)
    if near:
        claims.add(out / LIST)
        near.write(out / LIST)
    for split in SPLITS:
        _join_split(out / split, [part / split for part in parts], claims)
    identity = {key: value for key, value in _options(trees[0]).items() if key != TEXT}
    return _finish(out, claims, Corpus.open(str(parts[0])), identity, tally)


def _remove_parts(folder: Path) -> None:
    """Remove what is left of parts whose shards have been moved; foreign files stay."""
    for part in sorted(folder.glob("*-of-?????*")):
        if (part / MANIFEST).exists():
            journal.remove_corpus(part)
        journal.remove_if_empty(part)
    journal.remove_if_empty(folder)


def _finish(
    folder: Path, claims: Claims, part: Corpus, identity: dict[str, Any], tally: Tally
) -> dict[str, Any]:
    others = [part.folder / other_tokenizer(number) for number in range(len(part.others))]
    return finish_folder(
        folder,
        claims.add,
        str(part.tokenizer_dir),
        identity,
        tokenization.load(part.tokenizer_dir),
        vars(tally),
        other_tokenizers=others,
    )


def _parts(out: Path) -> list[Path]:
    """The finished parts, in order. Completes the replacement of a part by a killed merge."""
    for fresh in (out / PARTS).glob("*.new"):
        if not fresh.with_suffix("").exists():
            fresh.rename(fresh.with_suffix(""))
    names = sorted(path.name for path in (out / PARTS).glob("*-of-?????"))
    match = re.fullmatch(r"\d+-of-(\d+)", names[0]) if names else None
    if match is None:
        raise DataError(f"{out / PARTS}: holds folders that are not parts; move them away")
    tasks = int(match[1])
    parts = [part_folder(out, task, tasks) for task in range(tasks)]
    unexpected = set(names) - {part.name for part in parts}
    if unexpected:
        raise DataError(
            f"{out / PARTS}: {min(unexpected)} belongs to a build with another number of tasks; "
            "move it away"
        )
    for task, part in enumerate(parts):
        if not (part / MANIFEST).exists():
            raise DataError(f"{part}: is not finished; run --task {task}/{tasks} again")
    return parts


def _require_alike(parts: list[Path], trees: list[dict[str, Any]]) -> None:
    first = _options(trees[0])
    for part, tree in zip(parts, trees, strict=True):
        options = _options(tree)
        if options.get(TEXT) != first.get(TEXT):
            raise DataError(
                f"{part}: is a slice of another TEXT than {parts[0].name}; remove it, and build it "
                "again"
            )
        if options != first:
            raise DataError(
                f"{part}: was built with other options than {parts[0].name}; build it again"
            )


def _options(tree: dict[str, Any]) -> dict[str, Any]:
    """The options that all parts of a build share, and the text of which they are slices."""
    return {k: v for k, v in tree["identity"].items() if k not in ("files", "task")}


def _joined_tally(trees: list[dict[str, Any]]) -> Tally:
    parts = [Tally(**tree["tally"]) for tree in trees]
    tally = Tally(skipped_files=parts[0].skipped_files, first_skipped=parts[0].first_skipped)
    for part in parts:
        for name in ("documents", "duplicates", "near_duplicates", "problems", "characters"):
            setattr(tally, name, getattr(tally, name) + getattr(part, name))
        room = PROBLEMS_SHOWN - len(tally.first_problems)
        tally.first_problems += part.first_problems[:room]
        tally.loss.add(part.loss)
        crc = part.input_crc32.to_bytes(4, "little")
        tally.input_crc32 = zlib.crc32(crc, tally.input_crc32)
        tally.tokens_per_document = [
            a + b for a, b in zip(tally.tokens_per_document, part.tokens_per_document, strict=True)
        ]
    return tally


def _drop_duplicates(parts: list[Path], near: NearDuplicates | None) -> None:
    """Remove from each part the documents that an earlier part holds, and those like earlier ones.

    A part that was rewritten lists the digests and signatures of all its documents as before, so
    that an interrupted merge comes to the same decisions again.
    """
    seen: set[bytes] = set()
    for part in parts:
        data, tree = (part / DIGESTS).read_bytes(), manifest.read(part)
        digests = [data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)]
        is_new = np.array([digest not in seen for digest in digests], bool)
        seen.update(digests)
        keep = is_new if near is None else _unlike(near, part, tree["identity"]["files"], is_new)
        if keep.sum() != tree["tally"]["documents"]:
            _rewrite(part, digests, is_new, keep)


def _unlike(
    near: NearDuplicates, part: Path, files: list[Any], is_new: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """[documents] which of the new documents of a part are not like an earlier one."""
    records = records_in((part / SIGNATURES).read_bytes())
    pairs = zip(records, is_new, strict=True)
    return np.array(
        [bool(new) and near.is_new(record, files[record["file"]][0]) for record, new in pairs], bool
    )


def _rewrite(
    part: Path, digests: list[bytes], is_new: NDArray[np.bool_], keep: NDArray[np.bool_]
) -> None:
    """Replace a part by one with only the documents that `keep` [documents] marks.

    The others are duplicates, or, where `is_new`, near-duplicates.
    """
    tree, corpus = manifest.read(part), Corpus.open(str(part))
    fresh, old = part.with_name(f"{part.name}.new"), part.with_name(f"{part.name}.old")
    claims = _emptied(fresh)
    identity, tally = tree["identity"], Tally(**tree["tally"])
    tally.documents, tally.tokens_per_document = 0, Tally().tokens_per_document
    in_val = np.array([held_out(digest, identity["val_fraction"]) for digest in digests], bool)
    for split, chosen in (("train", keep[~in_val]), ("val", keep[in_val])):
        sizes = identity["shard_mb"], identity["block_bytes"]
        writer = SplitWriter(fresh / split, claims.add, corpus.vocab_size, *sizes)
        stored = documents(corpus.split(split)) if len(chosen) else iter(())
        for wanted, document in zip(chosen, stored, strict=True):
            if wanted:
                writer.add(document)
                tally.count(len(document.tokens))
        writer.finish()
    tally.duplicates += int((~is_new).sum())
    tally.near_duplicates += int((is_new & ~keep).sum())
    for name in (DIGESTS, SIGNATURES):
        if (part / name).exists():
            claims.add(fresh / name)
            shutil.copyfile(part / name, fresh / name)
    _finish(fresh, claims, corpus, identity, tally)
    part.rename(old)
    fresh.rename(part)
    Claims(part).remove_journal()
    journal.remove_corpus(old)


def _emptied(folder: Path) -> Claims:
    """The claims of a folder, without what an interrupted process wrote there.

    Raises DataError if another file is there.
    """
    Claims(folder).refuse_foreign_files()
    with disk_errors(folder):
        (folder / journal.JOURNAL).mkdir(parents=True, exist_ok=True)
    claims = Claims(folder)
    claims.remove_files()
    return claims


def documents(split: CorpusSplit) -> Iterator[Block]:
    """The documents of a split in order. A document that was cut between blocks is joined."""
    held: Block | None = None
    for number, record in enumerate(split.index.blocks):
        for nth, document in enumerate(_documents_in(split.read_block(number))):
            if held is not None and nth == 0 and record["continues"]:
                held = _continued(held, document)
                continue
            if held is not None:
                yield held
            held = document
    if held is not None:
        yield held


def _documents_in(block: Block) -> Iterator[Block]:
    """The documents of a block."""
    sentence_ends = np.cumsum(block.documents, dtype=np.int64)
    token_ends = np.cumsum(block.sentences, dtype=np.int64)[sentence_ends - 1]
    others = [_split_others(other) for other in block.others]
    parts = np.split(block.tokens, token_ends[:-1]), np.split(block.sentences, sentence_ends[:-1])
    for number, (tokens, sentences) in enumerate(zip(*parts, strict=True)):
        yield Block.document(tokens, sentences, tuple(other[number] for other in others))


def _split_others(other: OtherTokens) -> list[OtherTokens]:
    """The documents of a block by another tokenizer."""
    ends = np.cumsum(other.spans, dtype=np.int64)
    tokens = offsets(other.theirs)[ends]
    sizes = (np.split(part, ends[:-1]) for part in (other.ours, other.theirs))
    parts = zip(np.split(other.tokens, tokens[:-1]), *sizes, strict=True)
    return [OtherTokens.of(*part) for part in parts]


def _continued(head: Block, rest: Block) -> Block:
    """One document that is cut in two blocks."""
    both = joined([head, rest])
    others = tuple(OtherTokens.of(it.tokens, it.ours, it.theirs) for it in both.others)
    return Block.document(both.tokens, both.sentences, others)


def _join_split(out: Path, parts: list[Path], claims: Claims) -> None:
    """Move the shards of the parts into one folder and join their indexes."""
    indexes = [Index.open(part) for part in parts]
    shards, blocks, first_shard, first_block = [], [], 0, 0
    with disk_errors(out):
        out.mkdir(exist_ok=True)
        claims.add(*(out / name for name in INDEX_FILES))
        for part, index in zip(parts, indexes, strict=True):
            numbers = range(len(index.shards))
            places = {part / shard_name(n): out / shard_name(first_shard + n) for n in numbers}
            claims.add(*places.values())
            for source, target in places.items():
                if source.exists() or not target.exists():
                    os.replace(source, target)
            records = np.array(index.shards)
            records["first_block"] += np.uint64(first_block)
            shards.append(records)
            blocks.append(np.array(index.blocks))
            first_shard += len(index.shards)
            first_block += len(index.blocks)
        for name in (SENTENCES, DOCUMENTS):
            with open(out / name, "wb") as file:
                for part in parts:
                    file.write((part / name).read_bytes())
        counts = np.sum([index.token_counts for index in indexes], axis=0)
        write_index(out, shards, blocks, counts)
