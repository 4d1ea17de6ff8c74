"""Writing a task's encoded examples as a corpus: shards, index, tokenizer, manifest, and targets.

An example is a document, and each segment of its sequences a sentence. The targets lie beside the
index of each split, in the order of the examples::

    train/target-NAME.npy   one value for each example, or for each token
    train/ends-NAME.npy     where an example's values end, of a target with several for each
    train/columns.npy       the numbers beside the text of each example, as read, where it has any
    val/references.json     what predictions are compared with besides, where the task has that

The folder is written under a hidden name, and renamed when it is complete.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.building.finishing import finish_folder
from data_pipeline.errors import DataError
from data_pipeline.examples.example import SEVERAL, TOKENS, EncodedExample, Layout, TextEncoder
from data_pipeline.reading.corpus import SPLITS
from data_pipeline.shards import manifest
from data_pipeline.shards.blocks import Block
from data_pipeline.shards.locking import unfinished
from data_pipeline.shards.writing import SplitWriter, disk_errors


def target_file(split: str, target: str) -> str:
    """Where the values of a target are, inside the folder."""
    return f"{split}/target-{target}.npy"


def ends_file(split: str, target: str) -> str:
    """Where it says how many values of a target each example has."""
    return f"{split}/ends-{target}.npy"


def columns_file(split: str) -> str:
    """Where the numbers beside the texts are: float64, those of an example one behind the other."""
    return f"{split}/columns.npy"


REFERENCES = "val/references.json"


def read_references(folder: Path) -> Any:
    """The references that `store_examples` was given. Raises DataError if they are damaged."""
    files = manifest.files_of(manifest.read(folder))
    if REFERENCES not in files:
        raise DataError(f"{folder}: holds no {REFERENCES}; remove it: it is encoded again")
    manifest.verify(folder, {REFERENCES: files[REFERENCES]}, up_to=math.inf)
    return json.loads((folder / REFERENCES).read_bytes())


def store_examples(
    folder: Path,
    encoder: TextEncoder,
    tokenizer_dir: Path,
    identity: Mapping[str, Any],
    examples: Mapping[str, Iterable[EncodedExample]],
    references: Callable[[], Any] = lambda: None,
    others: Sequence[TextEncoder] = (),
) -> None:
    """Write the `examples` of the splits "train" and "val" to `folder`, which must not exist.

    `identity` says what they were made of; the manifest holds it. `references` gives what the
    predictions for "val" are compared with, as JSON, or None. Examples that `others` read too have
    their sequences behind those of the `encoder`. Raises DataError for examples of
    different layouts in a split, a split without examples, and a disk that is full.
    """
    with unfinished(folder) as part:
        names, layouts = [], {}
        for split in SPLITS:
            writer = _SplitOfExamples(part, split, [encoder, *others])
            names += writer.write(examples.get(split, ()))
            if writer.layout is not None:
                layouts[split] = writer.layout.to_json()
        if (compared := references()) is not None:
            with disk_errors(part):
                (part / REFERENCES).write_text(json.dumps(compared), encoding="utf-8")
            names.append(REFERENCES)
        tally: dict[str, Any] = {"examples": layouts, "cut": len(encoder.cut)}
        finish_folder(
            part,
            lambda *paths: None,
            str(tokenizer_dir),
            dict(identity),
            (encoder.tokenizer, encoder.vocabulary),
            tally,
            names,
            [other.tokenizer_dir for other in others],
        )
        _publish(part, folder)


def _publish(part: Path, folder: Path) -> None:
    """Give a complete folder its name, unless another process was faster."""
    try:
        os.rename(part, folder)
    except OSError as error:
        if not folder.is_dir():
            raise DataError(f"{folder}: cannot be written: {error.strerror}") from None


class _SplitOfExamples:
    """The writer of one split, and the targets and numbers collected for it."""

    def __init__(self, folder: Path, split: str, encoders: Sequence[TextEncoder]) -> None:
        vocab_size = max(encoder.vocabulary.vocab_size for encoder in encoders)
        self.folder, self.split, self._tokenizers = folder, split, len(encoders)
        self.layout: Layout | None = None
        self._writer = SplitWriter(folder / split, lambda *paths: None, vocab_size)
        self._targets: dict[str, list[Any]] = {}
        self._columns: list[list[float]] = []

    def write(self, examples: Iterable[EncodedExample]) -> list[str]:
        """Write the split; returns the names of the files beside its index."""
        for example in examples:
            self._add(example)
        self._writer.finish()
        names = []
        for name, kind in self.layout.targets.items() if self.layout else ():
            names.append(self._save(target_file(self.split, name), self._joined(name)))
            if kind == SEVERAL:
                ends = np.cumsum([len(values) for values in self._targets[name]], dtype=np.int64)
                names.append(self._save(ends_file(self.split, name), ends))
        if self.layout and self.layout.columns:
            names.append(
                self._save(columns_file(self.split), np.array(self._columns, "<f8").ravel())
            )
        return names

    def _save(self, name: str, values: NDArray[Any]) -> str:
        with disk_errors(self.folder):
            np.save(self.folder / name, values)
        return name

    def _add(self, example: EncodedExample) -> None:
        layout = Layout.of(example, self._tokenizers)
        if self.layout is None:
            self.layout = layout
        if layout != self.layout:
            raise DataError(f"{self.split}: examples differ in their sequences or targets")
        segments = example.segments
        sizes = np.array([len(segment) for segment in segments], "<u2")
        self._writer.add(Block.document(np.concatenate(segments), sizes))
        for name, value in example.targets.items():
            self._targets.setdefault(name, []).append(value)
        if example.columns:
            self._columns.append([*example.columns.values()])

    def _joined(self, name: str) -> NDArray[Any]:
        assert self.layout is not None
        values, dtype = self._targets.get(name, []), self.layout.dtype(name)
        if self.layout.targets[name] in (TOKENS, SEVERAL):
            return np.concatenate([np.zeros(0, dtype), *values]).astype(dtype)
        return np.array(values, dtype)
