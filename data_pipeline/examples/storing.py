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

from data_pipeline.building.finishing import finish_folder
from data_pipeline.errors import DataError
from data_pipeline.examples.example import SEVERAL, EncodedExample, Layout, TextEncoder
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
        # By file beside the index: as it is written, since a table may have 10 million rows.
        self._files: dict[str, tuple[np.dtype[Any], bytearray]] = {}

    def write(self, examples: Iterable[EncodedExample]) -> list[str]:
        """Write the split; returns the names of the files beside its index."""
        for example in examples:
            self._add(example)
        self._writer.finish()
        for name, (dtype, data) in self._files.items():
            with disk_errors(self.folder):
                np.save(self.folder / name, np.frombuffer(data, dtype))
        return [*self._files]

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
            end = self._keep(target_file(self.split, name), value, layout.dtype(name))
            if layout.targets[name] == SEVERAL:
                self._keep(ends_file(self.split, name), end, np.dtype("<i8"))
        if example.columns:
            self._keep(columns_file(self.split), [*example.columns.values()], np.dtype("<f8"))

    def _keep(self, file: str, values: Any, dtype: np.dtype[Any]) -> int:
        """Add a number or several to a file; returns how many it then has."""
        _, data = self._files.setdefault(file, (dtype, bytearray()))
        data += np.asarray(values, dtype).tobytes()
        return len(data) // dtype.itemsize
