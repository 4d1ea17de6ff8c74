"""The last step of a build or merge: tokenizer, word starts and manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from data_pipeline.building.near_duplicates import LIST, SIGNATURES
from data_pipeline.reading.corpus import SPLITS, WORD_STARTS
from data_pipeline.shards import manifest
from data_pipeline.shards.index import INDEX_FILES, Index
from data_pipeline.shards.manifest import DIGESTS, MANIFEST, PART
from data_pipeline.shards.writing import disk_errors, fsync
from data_pipeline.tokenization import tokenizer as tokenization


def finish_folder(
    folder: Path,
    claim: Callable[..., None],
    tokenizer_dir: str,
    identity: dict,
    loaded: tuple[tokenizers.Tokenizer, tokenization.Vocabulary],
    tally: dict,
    others: Sequence[str] = (),
) -> dict:
    """Write the files beside the splits, `corpus.json` last. Returns its content.

    `claim` is called for each file before it is created. `loaded` is the result of
    `tokenization.load` for `tokenizer_dir`. `others` are files that lie there already.
    """
    unknown = tokenization.unknown_id(loaded[0])
    tree = {
        "format": manifest.FORMAT,
        "identity": identity,
        "vocabulary": loaded[1].to_json(),
        "splits": {split: _describe(Index.open(folder / split), unknown) for split in SPLITS},
        "tally": {key: value for key, value in tally.items() if key != "chunks"},
    }
    part = folder / PART
    claim(part, folder / MANIFEST, folder / WORD_STARTS)
    claim(*(folder / "tokenizer" / name for name in tokenization.TOKENIZER_FILES))
    with disk_errors(folder):
        tokenizer_files = tokenization.install(Path(tokenizer_dir), folder / "tokenizer")
        np.save(folder / WORD_STARTS, tokenization.word_starts(*loaded))
        names = [f"{split}/{name}" for split in SPLITS for name in INDEX_FILES]
        names += [*others, WORD_STARTS, *(f"tokenizer/{name}" for name in tokenizer_files)]
        names += [name for name in (DIGESTS, SIGNATURES, LIST) if (folder / name).exists()]
        tree["files"] = manifest.records(folder, names)
        part.write_text(manifest.render(tree))
        # Each shard was synced to disk before it was renamed.
        for name in [*names, part.name, *SPLITS, "tokenizer", "."]:
            fsync(folder / name)
        os.replace(part, folder / MANIFEST)
        fsync(folder)
    return tree


def _describe(index: Index, unknown: int | None) -> dict:
    return {
        "shards": len(index.shards),
        "blocks": len(index.blocks),
        "documents": index.documents,
        "sentences": int(index.shards["sentences"].sum()),
        "tokens": index.tokens,
        "unknown_tokens": 0 if unknown is None else int(index.token_counts[unknown]),
        "bytes": int(index.shards["bytes"].sum()),
    }
