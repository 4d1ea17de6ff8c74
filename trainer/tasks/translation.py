"""Translation: a model with a decoder generates a text's translation, token by token."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from torch import Tensor

from configs.rules import COUNT, FRACTION, Doc, Matches, OneOf, Range, Unit
from configs.section import Refusal
from data_pipeline import (
    DEFAULT_VIEW,
    MASKED,
    DataError,
    EncodedExample,
    EveryToken,
    SomeTokens,
    TextEncoder,
    View,
)
from data_pipeline.task_files.contents import Dropped, present
from data_pipeline.task_files.parallel import SOURCE, TARGET, Languages, TextPair, read_pairs
from model import Ability, ModelConfig, ModelShape
from model.generation import DIVISORS, LENGTH
from trainer.batches import MicroBatch
from trainer.objectives.row_losses import RowLoss, cross_entropy_rows
from trainer.objectives.task import Part, ScoredByReferences, TaskFile
from trainer.objectives.term import LossInputs, Term, register
from trainer.objectives.vocabulary import VocabularyTerm
from trainer.scoring.metric import Metric
from trainer.scoring.scores import MaskedTokens
from trainer.scoring.translating import PAIR, SPLITTINGS, BleuMetric, References, Search

NAME = "translation"
# The views of a model that reads source and target in one sequence (C-MLM).
SOME_TOKENS, EVERY_TOKEN = "masked", "every_token"
LANGUAGE = Matches(r"[^/.\s]*", "a part of a file's name, without a dot, slash or space")
MASKED_FRACTION = 0.15  # of a target's tokens
SEQUENCES = math.ceil(1 / MASKED_FRACTION)  # in which each token is masked once


@register(NAME)
@dataclass
class Translation(ScoredByReferences):
    """Cross-entropy of every token of a translation and of the [SEP] behind it.

    It reads the columns source and target of a table, or two parallel files with a text on each
    line. A model without a decoder has the view `masked` ([CLS] source [SEP] target [SEP], with 15%
    of the target's tokens masked) or `every_token` (seven such sequences, which mask each token
    once).
    """

    source_language: Annotated[
        str,
        LANGUAGE,
        Doc("The part of a parallel file's name that marks the sources: `de` in train.de."),
    ] = ""
    target_language: Annotated[
        str, LANGUAGE, Doc("The part that marks the translations: `en` in train.en.")
    ] = ""
    label_smoothing: Annotated[
        float, FRACTION, Doc("e: the label counts 1 - e, and e is shared by the whole vocabulary.")
    ] = 0.1
    beams: Annotated[int, COUNT, Doc("Width of the beam; 1: greedy search.")] = 5
    length_penalty: Annotated[
        float,
        Range(0, 10),
        Doc(
            "a: the log probability of a sequence is divided by its `length_divisor` ** a; 0 "
            "prefers short sequences."
        ),
    ] = 1.0
    length_divisor: Annotated[
        str,
        OneOf(*DIVISORS),
        Doc("length: the number of tokens n; gnmt: (5 + n) / 6 (arXiv 1609.08144, eq. 14)."),
    ] = LENGTH
    max_length: Annotated[
        int, COUNT, Unit("tokens"), Doc("The largest number of tokens in a generated translation.")
    ] = 128
    lowercase: Annotated[
        bool, Doc("Compare texts in lower case (sacreBLEU's -lc), for uncased vocabularies.")
    ] = False

    bleu_words: Annotated[
        str | None,
        OneOf(*SPLITTINGS),
        Doc(
            "How BLEU finds words (sacreBLEU's --tokenize); null: 13a, but zh for Chinese and char "
            "for other scripts without spaces."
        ),
    ] = None

    name: ClassVar[str] = NAME
    fields: ClassVar[tuple[str, ...]] = (SOURCE, TARGET)
    joins: ClassVar[bool] = False
    needs: ClassVar[tuple[Ability, ...]] = ()
    views: ClassVar[Mapping[str, tuple[str, ...]]] = {
        SOME_TOKENS: (SOURCE, TARGET),
        EVERY_TOKEN: (SOURCE, TARGET),
    }
    unaligned: ClassVar[frozenset[str]] = frozenset({SOME_TOKENS})
    not_encoded: ClassVar[tuple[str, ...]] = (
        *(*ScoredByReferences.not_encoded, "label_smoothing", "beams", "length_penalty"),
        *("length_divisor", "max_length", "lowercase", "bleu_words"),
    )

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if self.layers:
            yield "layers", "the decoder's last layer is read; remove it"
        if bool(self.source_language) != bool(self.target_language):
            key = "target_language" if self.source_language else "source_language"
            yield key, "set both languages of parallel files, or neither for a table"
        if self.source_language and self.source_language == self.target_language:
            yield "target_language", "is that of the sources, whose names are then the same"
        if self.beams == 1:
            for key in self.changed("length_penalty", "length_divisor"):
                yield key, "is for beams, and the search is greedy; set beams above 1, or remove it"

    @property
    def head(self) -> str:
        return MASKED

    @property
    def languages(self) -> Languages:
        """The languages, as the names of files have them."""
        return Languages(self.source_language, self.target_language)

    def files_of(self, path: Path) -> list[Path]:
        return [Path(file) for file in self.languages.files(str(path))]

    def has_head(self, model: ModelConfig) -> bool:
        return Ability.GENERATE in model.abilities

    def unreadable(self, view: str, model: ModelConfig) -> str | None:
        if not model.mlm_head:
            return "the model has no masked-LM head"
        if self.has_head(model) == (view == DEFAULT_VIEW):
            return None
        if self.has_head(model):
            return f"a model of kind {model.kind} reads source and target separately; remove it"
        views = " or ".join(self.views)
        return f"a model of kind {model.kind} has no decoder; set the view to {views}"

    def view(self, name: str, seed: int) -> View:
        if name == SOME_TOKENS:
            return View([(0, 1)], SomeTokens(MASKED_FRACTION, seed))
        return View([(0, 1)] * SEQUENCES, EveryToken(SEQUENCES))

    def references(self, file: TaskFile, part: Part) -> Any:
        """The right translation of every pair."""
        return [pair.target for pair in file.first(present(self.pairs(file)))]

    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        dropped = Dropped()
        for number, pair in enumerate(file.first(dropped.present(self.pairs(file)))):
            source, target = (encoder.encode(x, pair.where).ids for x in (pair.source, pair.target))
            tokens = len(source) + len(target) + encoder.vocabulary.special_in(2)
            if tokens > encoder.length:
                raise DataError(
                    f"{pair.where}: source and target have {tokens} tokens "
                    f"with [CLS] and [SEP], and data.sequence_length is {encoder.length}; raise "
                    "it, or remove the pair"
                )
            sequences = [[encoder.array(ids)] for ids in (source, target)]
            yield EncodedExample(sequences, {PAIR: number}, predicted=1)
        dropped.tell(file.path)

    def pairs(self, file: TaskFile) -> Iterator[TextPair]:
        """The pairs of a file. Raises DataError."""
        columns = file.columns_of(SOURCE, TARGET)
        return read_pairs(str(file.path), columns, self.languages, file.encoding)

    def choices(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("words are compared by terms over the vocabulary")

    @property
    def search(self) -> Search:
        """How translations are searched."""
        return Search(self.beams, self.length_penalty, self.max_length, self.length_divisor)

    def own_metrics(self) -> tuple[Metric[Any], ...]:
        references = References(self.stored_references, Path(self.examples) / "tokenizer")
        bleu = BleuMetric(self.search, references, self.lowercase, self.bleu_words)
        return bleu, MaskedTokens()

    def metrics_in(self, view: str) -> tuple[Metric[Any], ...]:
        return self.own_metrics() if view == DEFAULT_VIEW else (MaskedTokens(),)

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return TranslationTerm(self)


class TranslationTerm(VocabularyTerm):
    denominator = MASKED

    def __init__(self, config: Translation) -> None:
        super().__init__(config)
        self.label_smoothing = config.label_smoothing

    def concerns(self, targets: Collection[str]) -> bool:
        return MASKED in targets

    def row_loss(self, inputs: LossInputs) -> RowLoss:
        labels = inputs.batch.targets[MASKED].labels
        return cross_entropy_rows(labels, self.label_smoothing)
