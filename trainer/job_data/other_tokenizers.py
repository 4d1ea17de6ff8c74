"""Text for learners that have another tokenizer than the corpora's first one."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline import Corpus
from data_pipeline.reading.batches import shared_view
from data_pipeline.reading.other_tokens import OtherView
from data_pipeline.tokenization.alignment import NONE, shared_tokens
from trainer.config import JobConfig
from trainer.learner_config import LearnerConfig
from trainer.learner_names import MEAN, OWN, TEACHER
from trainer.objectives.shared_spans import SharedSpans


def other_views(job: JobConfig, corpora: Mapping[str, Corpus]) -> dict[str, OtherView]:
    """The views of text that learners of other tokenizers read, by name.

    Their rows fit the smallest of the models that read them. Raises DataError where a corpus does
    not hold its text in their tokens.
    """
    learners = [learner for learner in job.learners.values() if learner.tokenizer is not None]
    return {
        learner.form: _view(learner, [it for it in learners if it.form == learner.form], corpora)
        for learner in learners
    }


def _view(
    learner: LearnerConfig, alike: list[LearnerConfig], corpora: Mapping[str, Corpus]
) -> OtherView:
    numbers = [corpus.number_of(Path(str(learner.tokenizer))) for corpus in corpora.values()]
    rooms = [model.longest_sequence for model in (it.model for it in alike)]
    first = next(iter(corpora.values()))
    longest = min((room for room in rooms if room is not None), default=None)
    return OtherView(numbers, first.others[numbers[0]], longest)


def shared_spans(
    job: JobConfig, learner: LearnerConfig, tokens: Callable[[LearnerConfig, LearnerConfig], Tensor]
) -> dict[str, SharedSpans]:
    """How a learner of text compares with the sources that have other tokenizers, by name.

    `tokens` gives the source's id of each of the learner's tokens, as `shared_ids` does.
    """
    if job.data.has_examples:
        return {}
    names = {name: TEACHER if name == MEAN else name for name in learner.objective.sources}
    sources = {name: job.learners[key] for name, key in names.items() if key != OWN}
    return {
        name: SharedSpans(
            shared_view(learner.form, source.form),
            learner.form,
            source.form,
            tokens(learner, source),
        )
        for name, source in sources.items()
        if source.tokenizer != learner.tokenizer
    }


def shared_ids(tokenizer: Path, learner: LearnerConfig, source: LearnerConfig) -> Tensor:
    """The source's id of each of the learner's tokens, int64 [V], -1 where it has none.

    `tokenizer` is the folder of the job's.
    """
    ours, theirs = (Path(it.tokenizer or tokenizer) for it in (learner, source))
    known = torch.from_numpy(shared_tokens(ours, theirs))
    return F.pad(known, (0, learner.model.vocab_size - len(known)), value=NONE)
