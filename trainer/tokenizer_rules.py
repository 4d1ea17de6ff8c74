"""Rules for learners of several tokenizers: what they may read, compare and copy."""

from collections.abc import Iterator, Mapping

from configs.section import Refusal
from data_pipeline import DataConfig
from trainer.denominators import ATTENDED
from trainer.learner_config import LearnerConfig
from trainer.learner_names import MEAN, TEACHER, is_teacher, section_of
from trainer.objectives.term import TermConfig
from trainer.objectives.terms.predictions import DivergenceConfig, unshared_vocabulary

Named = Mapping[str, LearnerConfig]


def sources_of(term: TermConfig, learners: Named) -> dict[str, LearnerConfig]:
    """The learners whose outputs a term reads, by name."""
    return {
        name: learner
        for name, learner in learners.items()
        if term.source == name or (term.source == MEAN and is_teacher(name))
    }


def conflicts_of_tokenizers(learners: Named, data: DataConfig) -> Iterator[Refusal]:
    """Tokenizers of learners that cannot have their own, or compare or copy what is of others."""
    terms = (config.objective.task_terms().values() for config in learners.values())
    unfit = [task.name for tasks in terms for task in tasks if not task.any_tokenizer]
    what = ["several tasks"] if data.tasks else unfit
    if not data.has_examples:
        yield from _conflicts_of_text(learners, data)
    for name, config in learners.items():
        key, init = section_of(name), config.init
        if config.tokenizer is not None and what:
            why = f"is for text and tasks with labels of whole examples, not for {what[0]}"
            yield f"{key}.tokenizer", f"{why}; remove it, and train with one tokenizer"
        for term_name, term in config.objective.terms().items():
            if reason := _incomparable(term, config, sources_of(term, learners), data):
                yield f"{key}.objective.{term_name}", reason
        if config.tokenizer == learners[TEACHER].tokenizer:
            continue
        for copied in ("teacher_layers", "teacher_embeddings"):
            if getattr(init, copied):
                why = "copies the teacher's embeddings, which are of another tokenizer's tokens"
                yield f"{key}.init.{copied}", f"{why}; remove it, or {key}.tokenizer"


def _incomparable(
    term: TermConfig, config: LearnerConfig, read: Named, data: DataConfig
) -> str | None:
    """Why a term cannot compare a learner with its sources, by their tokenizers or vocabularies."""
    tokenizers = {other.tokenizer for other in read.values()}
    if not tokenizers - {config.tokenizer}:
        if not isinstance(term, DivergenceConfig) or term.any_vocabulary:
            return None
        for name, other in read.items():
            if other.model.vocab_size != config.model.vocab_size:
                reason = unshared_vocabulary(config.model.vocab_size, other.model.vocab_size)
                return reason if name == TEACHER else f"{reason} ({section_of(name)})"
        return None
    if data.has_examples:
        why = "compares states, so that its teacher must have the same tokenizer"
        return why if term.reads_states else None
    if not term.compares_spans:
        return "compares token with token, so that its teacher must have the same tokenizer"
    if getattr(term, "positions", None) == ATTENDED and isinstance(term, DivergenceConfig):
        return "compares predictions across tokenizers at masked positions only; set positions"
    if len(tokenizers) > 1:
        return "the mean is of teachers with one tokenizer; name one teacher"
    if None not in {config.tokenizer, *tokenizers}:
        return "one of the two must read by the corpus' first tokenizer; remove a tokenizer"
    return None


def _conflicts_of_text(learners: Named, data: DataConfig) -> Iterator[Refusal]:
    """Learners of text that have another tokenizer than the corpus' first one."""
    for name, config in learners.items():
        key = section_of(name)
        if config.tokenizer is None:
            continue
        if name == TEACHER:
            why = "masks are drawn on the teacher's tokens; build the corpus with its tokenizer"
            yield f"{key}.tokenizer", f"{why}, and --also the students'"
        if data.masking.on_device:
            yield "data.masking.on_device", f"{key}.tokenizer needs its masks; set it to false"
        if data.has_next_tokens:
            yield f"{key}.tokenizer", "has spans to mask, and next_token masks none; remove it"
        if config.compile:
            yield f"{key}.compile", "is for rows of few lengths; remove it, or tokenizer"
