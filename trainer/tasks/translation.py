"""Translation: a model with a decoder generates a text's translation, token by token."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from configs.rules import COUNT, FRACTION, Matches, OneOf, Range, Unit
from configs.section import Refusal
from data_pipeline import (
    DEFAULT_VIEW,
    MASKED,
    NO_LABEL,
    DataError,
    EncodedExample,
    EveryToken,
    SomeTokens,
    TextEncoder,
    View,
    Vocabulary,
)
from data_pipeline.task_files.contents import Dropped, present
from data_pipeline.task_files.parallel import SOURCE, TARGET, Languages, TextPair, read_pairs
from data_pipeline.text.sentences import spaceless_share
from data_pipeline.tokenization.tokenizer import load
from model import Ability, Model, ModelConfig, ModelShape, beam_search, greedy_search
from model.generation import DIVISORS, LENGTH
from trainer.batches import MicroBatch
from trainer.objectives.row_losses import RowLoss, cross_entropy_rows
from trainer.objectives.task import Part, ScoredByReferences, TaskFile
from trainer.objectives.term import LossInputs, Term, register
from trainer.objectives.vocabulary import VocabularyTerm
from trainer.scoring.columns import NUMBER, Column
from trainer.scoring.metric import Metric, SummedMetric
from trainer.scoring.scores import MaskedTokens, ScoreInputs
from trainer.scoring.task_scores import require_packages

BLEU = Column("bleu", "BLEU", NUMBER)
PAIR = "pair"  # the target that holds the number of a pair in its file
ORDER = 4  # of the longest n-grams that count
SPLITTINGS = ("13a", "intl", "zh", "char", "none")  # sacreBLEU's, of texts into words


Search = Callable[[Model, Vocabulary, Tensor, Tensor], list[list[int]]]  # `Translation.search`


@dataclass(frozen=True)
class References:
    """The right translations, by number, and the tokenizer of those that are compared."""

    read: Callable[[], list[str]]
    tokenizer: Path

    @cached_property
    def texts(self) -> list[str]:
        """They are read once."""
        return self.read()

    @cached_property
    def splitting(self) -> str:
        """sacreBLEU's word splitting that suits their script."""
        spaceless = spaceless_share(self.texts)
        if spaceless is None:
            return SPLITTINGS[0]
        return "zh" if spaceless[1] == "Han" else "char"

    @cached_property
    def loaded(self) -> tuple[Callable[[list[int]], str], Vocabulary]:
        """The function that makes a text of token ids, and the vocabulary."""
        tokenizer, vocabulary = load(self.tokenizer)
        return tokenizer.decode, vocabulary


class BleuMetric(SummedMetric[ScoreInputs]):
    """BLEU of the corpus (Papineni et al., 2002), 0 to 100, as sacreBLEU computes it.

    Sums the counts of which it is made, so that it is the same on any number of ranks. Raises
    TrainingError without the package.
    """

    head = MASKED
    columns = (BLEU,)
    size = 2 * ORDER + 2

    def __init__(
        self, search: Search, references: References, lowercase: bool, splitting: str | None
    ) -> None:
        require_packages([BLEU.name])
        self.search, self.references, self.lowercase = search, references, lowercase
        self.splitting = splitting  # None: that of the references' script

    @torch.no_grad()
    def of_batch(self, outputs: ScoreInputs) -> Tensor:
        """Matches and n-grams of each order, words of translations and of references; [10]."""
        batch, model = outputs.batch, outputs.model
        numbers = batch.row_labels(PAIR)
        has_target = numbers != NO_LABEL
        if not has_target.any():
            return self.empty(batch.input_ids.device)
        sources, mask = batch.input_ids[0::2][has_target], batch.attention_mask[0::2][has_target]
        lengths = mask.sum(dim=1)
        decode, vocabulary = self.references.loaded
        translations = self.search(model, vocabulary, sources[:, : int(lengths.max())], lengths)
        right = [self.references.texts[number] for number in numbers[has_target].tolist()]
        splitting = self.splitting or self.references.splitting
        texts = [decode(ids) for ids in translations]
        counts = bleu_counts(texts, right, self.lowercase, splitting)
        return torch.tensor(counts, dtype=torch.float64, device=batch.input_ids.device)

    def finish(self, total: Tensor) -> dict[str, float]:
        counts = [round(count) for count in total.tolist()]
        return {BLEU.name: bleu_of(counts)} if counts[-1] else {}


def bleu_counts(
    translations: Sequence[str],
    right: Sequence[str],
    lowercase: bool,
    splitting: str = SPLITTINGS[0],
) -> list[int]:
    """The counts of `BleuMetric.of_batch` for these texts, of which BLEU is made."""
    from sacrebleu.metrics import BLEU as Scorer

    scorer = Scorer(lowercase=lowercase, force=True, tokenize=splitting)
    score = scorer.corpus_score(list(translations), [list(right)])
    return [*score.counts, *score.totals, score.sys_len, score.ref_len]


def bleu_of(counts: Sequence[int]) -> float:
    """BLEU of the sums of `bleu_counts`, with sacreBLEU's default smoothing."""
    from sacrebleu.metrics import BLEU as Scorer

    correct, total = [*counts[:ORDER]], [*counts[ORDER : 2 * ORDER]]
    lengths = counts[2 * ORDER :]
    return float(Scorer.compute_bleu(correct, total, *lengths, smooth_method="exp").score)


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
        "The part of a parallel file's name that marks the sources: `de` in train.de.",
    ] = ""
    target_language: Annotated[
        str, LANGUAGE, "The part that marks the translations: `en` in train.en."
    ] = ""
    label_smoothing: Annotated[
        float, FRACTION, "e: the label counts 1 - e, and e is shared by the whole vocabulary."
    ] = 0.1
    beams: Annotated[int, COUNT, "Width of the beam; 1: greedy search."] = 5
    length_penalty: Annotated[
        float,
        Range(0, 10),
        "a: the log probability of a sequence is divided by its `length_divisor` ** a; 0 "
        "prefers short sequences.",
    ] = 1.0
    length_divisor: Annotated[
        str,
        OneOf(*DIVISORS),
        "length: the number of tokens n; gnmt: (5 + n) / 6 (arXiv 1609.08144, eq. 14).",
    ] = LENGTH
    max_length: Annotated[
        int, COUNT, Unit("tokens"), "The largest number of tokens in a generated translation."
    ] = 128
    lowercase: Annotated[
        bool, "Compare texts in lower case (sacreBLEU's -lc), for uncased vocabularies."
    ] = False

    bleu_words: Annotated[
        str | None,
        OneOf(*SPLITTINGS),
        "How BLEU finds words (sacreBLEU's --tokenize); null: 13a, but zh for Chinese and char "
        "for other scripts without spaces.",
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
        *ScoredByReferences.not_encoded,
        *("label_smoothing", "beams", "length_penalty"),
        *("length_divisor", "max_length", "lowercase", "bleu_words"),
    )

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if self.layers:
            yield "layers", "the decoder's last layer is read; remove it"
        for key in self.changed("dropout", "module"):
            yield key, "is for the head of a task, and a translation has none; remove it"
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

    def search(
        self, model: Model, vocabulary: Vocabulary, sources: Tensor, lengths: Tensor
    ) -> list[list[int]]:
        """The translations of sources, int64 [N, S] with `lengths` [N], as token ids."""
        longest = min(self.max_length, (model.config.longest_sequence or self.max_length + 1) - 1)
        start = torch.full((len(sources),), vocabulary.cls, device=sources.device)
        decoding = model.decoding(sources, lengths)
        if self.beams == 1:
            return greedy_search(decoding, start, vocabulary.sep, longest)
        settings = self.beams, self.length_penalty, self.length_divisor
        return beam_search(decoding, start, vocabulary.sep, longest, *settings)

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
