"""The last step of a build or merge: tokenizer, word starts and manifest."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from configs.durable import fsync
from data_pipeline.building.near_duplicates import LIST, SIGNATURES
from data_pipeline.reading.corpus import SPLITS, TOKENIZER, WORD_STARTS, other_tokenizer
from data_pipeline.shards import manifest
from data_pipeline.shards.index import INDEX_FILES, Index
from data_pipeline.shards.manifest import DIGESTS, MANIFEST, PART
from data_pipeline.shards.writing import disk_errors
from data_pipeline.tokenization import tokenizer as tokenization

_LEFT_OUT = ("chunks", "tokenizers")  # of a tally: its progress, and what is written from others


def finish_folder(
    folder: Path,
    claim: Callable[..., None],
    tokenizer_dir: str,
    identity: dict[str, Any],
    loaded: tuple[tokenizers.Tokenizer, tokenization.Vocabulary],
    tally: dict[str, Any],
    others: Sequence[str] = (),
    other_tokenizers: Sequence[Path] = (),
) -> dict[str, Any]:
    """Write the files beside the splits, `corpus.json` last. Returns its content.

    `claim` is called for each file before it is created. `loaded` is the result of
    `tokenization.load` for `tokenizer_dir`. `others` are files that lie there already.
    `other_tokenizers` also read the corpus.
    """
    tree: dict[str, Any] = {
        "format": manifest.FORMAT,
        "identity": identity,
        "vocabulary": loaded[1].to_json(),
        "splits": {split: _describe(Index.open(folder / split), loaded[0]) for split in SPLITS},
        "tally": {key: value for key, value in tally.items() if key not in _LEFT_OUT},
    }
    if other_tokenizers:
        read = [tokenization.load(path)[1].to_json() for path in other_tokenizers]
        tree["tally"]["tokenizers"] = read
    by_place = {TOKENIZER: Path(tokenizer_dir)}
    by_place |= {other_tokenizer(number): path for number, path in enumerate(other_tokenizers)}
    part = folder / PART
    claim(part, folder / MANIFEST, folder / WORD_STARTS)
    for place in by_place:
        claim(*(folder / place / name for name in tokenization.TOKENIZER_FILES))
    with disk_errors(folder):
        installed = [
            f"{place}/{name}"
            for place, path in by_place.items()
            for name in tokenization.install(path, folder / place)
        ]
        np.save(folder / WORD_STARTS, tokenization.word_starts(*loaded))
        names = [f"{split}/{name}" for split in SPLITS for name in INDEX_FILES]
        names += [*others, WORD_STARTS, *installed]
        names += [name for name in (DIGESTS, SIGNATURES, LIST) if (folder / name).exists()]
        tree["files"] = manifest.records(folder, names)
        part.write_text(manifest.render(tree))
        # Each shard was synced to disk before it was renamed.
        for name in [*names, part.name, *SPLITS, *by_place, "."]:
            fsync(folder / name)
        os.replace(part, folder / MANIFEST)
        fsync(folder)
    return tree


def _describe(index: Index, tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    unknown = tokenization.unknown_id(tokenizer)
    return {
        "shards": len(index.shards),
        "blocks": len(index.blocks),
        "documents": index.documents,
        "sentences": int(index.shards["sentences"].sum()),
        "tokens": index.tokens,
        "unknown_tokens": 0 if unknown is None else int(index.token_counts[unknown]),
        "bytes": int(index.shards["bytes"].sum()),
    }
