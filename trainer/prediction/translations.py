"""Translations of texts by an exported model that generates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from data_pipeline import MASKED, TextEncoder
from data_pipeline.task_files.parallel import SOURCE, read_sources
from model import Model
from trainer.batches import rows_by_length
from trainer.objectives.task import TaskFile
from trainer.prediction.passes import sorted_together, tokens_per_pass
from trainer.prediction.predictor import tell_incomplete
from trainer.task_facts import TaskFacts, open_encoder
from trainer.tasks.translation import Translation

AT_ONCE = 1024  # fewer than of a head's outputs, as a search takes longer


def translations(
    folder: Path,
    model: Model,
    path: str,
    device: torch.device,
    columns: Mapping[str, str],
    encoding: str | None = None,
) -> Iterator[dict[str, Any]]:
    """``{"translation": ...}`` of each text in a file, in order, searched as in training.

    An empty text has null for it, and is counted. Raises DataError for a file that cannot be read.
    """
    facts = TaskFacts.read(folder, MASKED).with_columns(columns).in_encoding(encoding)
    task = facts.section(Translation)
    encoder = open_encoder(folder, model.config, facts.sequence_length)
    column = TaskFile(Path(path), facts.columns).columns_of(SOURCE)
    texts, unanswered = read_sources(path, column, facts.encoding), 0
    for some in sorted_together(texts, AT_ONCE, path):
        sources = [_encoded(encoder, text, where) for where, text in some]
        unanswered += sources.count([])
        read = [source for source in sources if source]
        searched = iter(_searched(model, task, encoder, read, device))
        for source in sources:
            translation = encoder.tokenizer.decode(next(searched)) if source else None
            yield {"translation": translation}
    tell_incomplete(path, unanswered, encoder)


def _encoded(encoder: TextEncoder, text: str, where: str) -> list[int]:
    """The tokens of a text; none of a blank one."""
    return encoder.sequence([text], where)[0].tolist() if text.strip() else []


@torch.inference_mode()
def _searched(
    model: Model,
    task: Translation,
    encoder: TextEncoder,
    sources: list[list[int]],
    device: torch.device,
) -> list[list[int]]:
    """The translation of each source, texts of similar length together."""
    vocabulary = encoder.vocabulary
    translations: list[list[int]] = [[]] * len(sources)
    lengths = [len(source) + 2 for source in sources]
    for rows in rows_by_length(lengths, max(1, tokens_per_pass(device) // task.beams)):
        ids = torch.full((len(rows), lengths[rows[0]]), vocabulary.pad)
        for place, row in enumerate(rows):
            source = [vocabulary.cls, *sources[row], vocabulary.sep]
            ids[place, : len(source)] = torch.tensor(source)
        sizes = torch.tensor([lengths[row] for row in rows], device=device)
        texts = task.search.run(model, vocabulary, ids.to(device), sizes)
        for row, translation in zip(rows, texts, strict=True):
            translations[row] = translation
    return translations
