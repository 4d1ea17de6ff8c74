"""Translations by a model that generates, and their BLEU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from data_pipeline import MASKED, NO_LABEL, Vocabulary
from data_pipeline.text.sentences import spaceless_share
from data_pipeline.tokenization.tokenizer import load
from model import Model, beam_search, greedy_search
from model.generation import LENGTH
from trainer.scoring.column import NUMBER, Column
from trainer.scoring.metric import SummedMetric
from trainer.scoring.scores import ScoreInputs
from trainer.scoring.task_scores import require_packages

BLEU = Column("bleu", "BLEU", NUMBER)
PAIR = "pair"  # the target that holds the number of a pair in its file
ORDER = 4  # of the longest n-grams that count
SPLITTINGS = ("13a", "intl", "zh", "char", "none")  # sacreBLEU's, of texts into words


@dataclass(frozen=True)
class Search:
    """How translations are searched (`model.generation`); one beam is greedy search."""

    beams: int
    length_penalty: float
    longest: int
    divisor: str = LENGTH

    def run(
        self, model: Model, vocabulary: Vocabulary, sources: Tensor, lengths: Tensor
    ) -> list[list[int]]:
        """The translations of sources, int64 [N, S] with `lengths` [N], as token ids."""
        longest = min(self.longest, (model.config.longest_sequence or self.longest + 1) - 1)
        start = torch.full((len(sources),), vocabulary.cls, device=sources.device)
        decoding = model.decoding(sources, lengths)
        if self.beams == 1:
            return greedy_search(decoding, start, vocabulary.sep, longest)
        settings = self.beams, self.length_penalty, self.divisor
        return beam_search(decoding, start, vocabulary.sep, longest, *settings)


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
        translations = self.search.run(model, vocabulary, sources[:, : int(lengths.max())], lengths)
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
