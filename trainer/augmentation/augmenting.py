"""More examples of a task in a table: those that there are, and copies with words replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_pipeline import DataError
from data_pipeline.augmentation.replacement import Replacement, replaceable
from data_pipeline.augmentation.sentence import Sentence
from data_pipeline.augmentation.word_vectors import WordVectors
from data_pipeline.task_files.tables import read_table
from data_pipeline.tokenization.tokenizer import load as load_tokenizer
from model import ModelError, from_pretrained
from trainer.augmentation.input_vectors import InputVectors
from trainer.augmentation.masked_words import MaskedWords
from trainer.augmentation.table_file import TableFile
from trainer.config import JobConfig
from trainer.job_data.examples import digest_of, tasks_of
from trainer.objectives.task import LABEL, TaskFile

PART = 64  # examples that are written at a time


@dataclass(frozen=True)
class Augmentation:
    """What decides the augmented examples: TinyBERT's settings, and where candidates come from.

    vectors: a file in GloVe's format; None: the input embeddings of the model in `folder`.
    """

    folder: Path
    replacement: Replacement
    candidates: int = 15
    vectors: Path | None = None
    beside_original: bool = True

    def identity(self) -> dict[str, Any]:
        """Plain values that are equal for equal results; DataError for a file that is not there."""
        files = {"model": self.folder / "model.safetensors"}
        if self.vectors is not None:
            files["vectors"] = self.vectors
        return {
            **dataclasses.asdict(self.replacement),
            "candidates": self.candidates,
            "beside_original": self.beside_original,
            **{name: digest_of(path) for name, path in files.items()},
        }


def augment(
    job: JobConfig,
    settings: Augmentation,
    out: Path,
    device: torch.device,
    on_progress: Callable[[int, int], None] = lambda done, all_of: None,
) -> tuple[int, int]:
    """Write the training examples of a task with their copies to `out`; how many, and of how many.

    `job` is about one task. An interrupted call is resumed by the same call. Raises DataError or
    ModelError, one line, for a task that is not about texts in tables, or has no validation file,
    and for bad inputs.
    """
    (one,) = tasks_of(job)
    name, task = one.name, one.task
    if LABEL not in task.fields:
        raise DataError(f"data augment: {name} does not read texts from tables, so has no copies")
    if not job.data.validation:
        raise DataError(
            "data.validation: must be set: of augmented examples no part can be held out, as "
            "copies of it stay in the others"
        )
    file = TaskFile(job.data.task_files["train"], job.data.columns)
    columns = file.columns_of(*task.fields)
    identity = {**settings.identity(), "examples": digest_of(file.path), "columns": columns}
    table = TableFile(out, columns, identity)
    rows = [row for _, row in read_table(str(file.path), columns)]
    copies = _Copies(settings, device)
    parts = range(0, len(rows), PART)
    for part, first in enumerate(parts):
        if not table.has(part):
            some = rows[first : first + PART]
            table.write(part, copies.of_examples(some, task.texts, first))
        on_progress(min(first + PART, len(rows)), len(rows))
    return table.finish(len(parts)), len(rows)


class _Copies:
    """Makes copies of examples, with the words of one text at a time replaced."""

    def __init__(self, settings: Augmentation, device: torch.device) -> None:
        self._settings = settings
        model = from_pretrained(settings.folder)
        if model.head is None:
            raise ModelError(f"{settings.folder}: has no masked-LM head; name a pre-trained model")
        self._tokenizer, vocabulary = load_tokenizer(settings.folder)
        self._vectors = WordVectors.read(settings.vectors) if settings.vectors else None
        self._inputs = None if settings.vectors else InputVectors(model, self._tokenizer)
        self._masked = MaskedWords(
            model.to(device),
            self._tokenizer,
            vocabulary,
            settings.candidates,
            settings.beside_original,
        )

    def of_examples(
        self, rows: Sequence[Mapping[str, str]], texts: Sequence[str], first: int
    ) -> Iterator[Mapping[str, str]]:
        """Each row, then its copies; `first` is the number of the first."""
        sentences = [Sentence.read(row[field], self._tokenizer) for row in rows for field in texts]
        candidates = self._candidates(sentences)
        for number, row in enumerate(rows):
            yield row
            for place, field in enumerate(texts):
                at = number * len(texts) + place
                copies = self._settings.replacement.copies_of(
                    sentences[at], candidates[at], first + number, place
                )
                yield from ({**row, field: text} for text in copies)

    def _candidates(self, sentences: Sequence[Sentence]) -> list[dict[int, list[str]]]:
        """Of each sentence, the candidates of its words that may be replaced, by their numbers."""
        words = [replaceable(sentence) for sentence in sentences]
        single = [
            [word for word in own if len(sentence.words[word].pieces) == 1]
            for sentence, own in zip(sentences, words, strict=True)
        ]
        found = self._masked.candidates(sentences, single)
        for sentence, own, known, candidates in zip(sentences, words, single, found, strict=True):
            for word in set(own) - set(known):
                candidates[word] = self._nearest(sentence, word)
        return [{word: said for word, said in one.items() if said} for one in found]

    def _nearest(self, sentence: Sentence, number: int) -> list[str]:
        word, count = sentence.words[number], self._settings.candidates
        if self._vectors is not None:
            return self._vectors.nearest(word.text, count)
        assert self._inputs is not None
        return self._inputs.nearest([sentence.ids[piece] for piece in word.pieces], count)
