"""The augmentation of Tang et al.: copies of examples with words masked, replaced, and left out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_pipeline.augmentation.perturbation import Lexicon, Perturbation, Tagger, tagged, untagged
from data_pipeline.task_files.conll import LAST
from data_pipeline.task_files.contents import UTF_8
from data_pipeline.text.sentences import spaceless_share
from data_pipeline.tokenization.tokenizer import load
from trainer.augmentation.augmenting import Row
from trainer.job_data.encoding import digest_of

_log = logging.getLogger(__name__)


def mask_token(tokenizer_dir: str | None) -> str | None:
    """The mask token of the tokenizer in a folder; None without a folder."""
    if tokenizer_dir is None:
        return None
    tokenizer, vocabulary = load(Path(tokenizer_dir))
    return tokenizer.id_to_token(vocabulary.mask)


@dataclass(frozen=True)
class TaggedFile:
    """A file of words with their parts of speech, in this column of CoNLL's; -1: the last."""

    path: Path
    column: int = LAST
    encoding: str = UTF_8

    def identity(self) -> dict[str, Any]:
        """Plain values that are equal for equal tags; DataError for a file that is not there."""
        return {"content": digest_of(self.path), "column": self.column, "encoding": self.encoding}


@dataclass(frozen=True)
class Perturbing:
    """The settings, and the file from which parts of speech are learnt.

    Without a file no word is replaced: `perturbation.replace` must be 0.
    """

    perturbation: Perturbation
    tagged: TaggedFile | None = None

    def identity(self) -> dict[str, Any]:
        """Plain values that are equal for equal results; DataError for a file that is not there."""
        values = dataclasses.asdict(self.perturbation)
        return values if self.tagged is None else {**values, "tagged": self.tagged.identity()}

    @property
    def files(self) -> Sequence[Path]:
        """The files and folders that `over` reads."""
        return [] if self.tagged is None else [self.tagged.path]

    def over(self, rows: Sequence[Row], texts: Sequence[str], device: torch.device) -> _Copies:
        """The maker of the copies; learns to tag words, and counts those of all examples by tag."""
        file = self.tagged
        tags_of = (
            untagged if file is None else Tagger.learn(file.path, file.column, file.encoding).tags
        )
        words = {field: [row[field] for row in rows] for field in texts}
        if spaceless := spaceless_share(text for some in words.values() for text in some):
            share, script = spaceless
            _log.warning(
                "%.0f%% of the letters have no spaces between words (%s): what stands between "
                "spaces is masked as one word; put spaces between the words",
                100 * share,
                script,
            )
        tags = {field: tags_of(column) for field, column in words.items()}
        counted = (pair for field in texts for pair in tagged(words[field], tags[field]))
        by_example = list(zip(*tags.values(), strict=True))
        return _Copies(self.perturbation, texts, by_example, Lexicon(counted))


@dataclass(frozen=True)
class _Copies:
    perturbation: Perturbation
    texts: Sequence[str]
    tags: Sequence[Sequence[Sequence[str]]]  # of each example, and each of its texts
    lexicon: Lexicon

    def of_examples(self, rows: Sequence[Row], first: int) -> Iterator[Row]:
        """Yield each row, then its copies; `first` is the number of the first row."""
        for number, row in enumerate(rows, first):
            yield row
            row_texts = [row[field] for field in self.texts]
            copies = self.perturbation.copies_of(row_texts, self.tags[number], self.lexicon, number)
            yield from ({**row, **dict(zip(self.texts, copy, strict=True))} for copy in copies)
