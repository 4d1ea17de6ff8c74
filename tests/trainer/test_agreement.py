"""Agreement of two models on held-out text, against plain torch on full logits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from data_pipeline import BatchStream, DataConfig, MaskingConfig, open_corpora
from model import EncoderConfig, build
from trainer.config import EvaluationConfig, JobConfig
from trainer.evaluation.agreement import agreement
from trainer.evaluation.held_out import ValidationSet
from trainer.learner_config import LearnerConfig
from trainer.objectives import ObjectiveConfig
from trainer.tasks.masked_language_modelling import MaskedLanguageModelling

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def validation(corpus) -> ValidationSet:
    data = DataConfig(path=str(corpus), sequence_length=32)
    evaluation = EvaluationConfig(sequences=16)
    teacher = LearnerConfig(objective=ObjectiveConfig(mlm=MaskedLanguageModelling()))
    return ValidationSet(
        JobConfig("job", data, teacher, 1, evaluation=evaluation), open_corpora(data)
    )


def small(seed: int, **sizes: int):
    config = EncoderConfig(
        vocab_size=600, hidden_size=32, layers=2, heads=2, ffn_size=64, max_positions=32
    )
    return build(dataclasses.replace(config, **sizes), seed).eval()


@torch.no_grad()
def test_agreement_is_that_of_the_whole_logits(validation):
    student, teacher = small(1, hidden_size=16), small(2)
    found = agreement(student, teacher, validation, 4, CPU)
    ours, theirs = [], []
    for batch in next(iter(validation.corpora.values())).batches():
        chosen = torch.from_numpy(batch.labels()) >= 0
        inputs = [
            torch.from_numpy(array).long()
            for array in (batch.input_ids, batch.segment_ids, batch.attention_mask)
        ]
        ours.append(student(*inputs).logits[chosen])
        theirs.append(teacher(*inputs).logits[chosen])
    s, t = torch.cat(ours), torch.cat(theirs)
    assert found.top_1 == (s.argmax(-1) == t.argmax(-1)).double().mean().item()
    expected = (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1).mean()
    assert found.kl == pytest.approx(expected.item(), rel=1e-4)


def test_a_model_agrees_with_itself(validation):
    teacher = small(2)
    found = agreement(teacher, teacher, validation, 8, CPU)
    assert found.top_1 == 1.0
    assert found.kl == pytest.approx(0.0, abs=1e-6)


def test_vocabularies_of_two_sizes_are_not_compared(validation):
    assert agreement(small(1, vocab_size=608), small(2), validation, 8, CPU) is None


def test_held_out_sequences_have_one_masking_rate(corpus):
    """That of the first step, though the job's changes."""
    teacher = LearnerConfig(objective=ObjectiveConfig(mlm=MaskedLanguageModelling()))

    def labels(**masking: float):
        data = DataConfig(path=str(corpus), masking=MaskingConfig(rate=0.3, **masking))
        job = JobConfig("job", data, teacher, 1, evaluation=EvaluationConfig(sequences=16))
        (held_out,) = ValidationSet(job, open_corpora(data)).corpora.values()
        return np.concatenate([batch.labels() for batch in held_out.batches()])

    np.testing.assert_array_equal(labels(), labels(final_rate=0.15, final_rate_step=9))


@pytest.mark.parametrize("wanted", [1, 64, 70, 10**6])
def test_as_many_sequences_are_scored_as_are_asked_for_or_there(corpus, wanted):
    data = DataConfig(path=str(corpus), sequence_length=16)
    teacher = LearnerConfig(objective=ObjectiveConfig(mlm=MaskedLanguageModelling()))
    evaluation = EvaluationConfig(sequences=wanted)
    job = JobConfig("job", data, teacher, 1, evaluation=evaluation)
    corpora = open_corpora(data)
    there = BatchStream(next(iter(corpora.values())).split("val"), data, 0, 1).samples_per_epoch
    assert there > 70
    (held_out,) = ValidationSet(job, corpora).corpora.values()
    ids = [one for batch in held_out.batches() for one in batch.sample_ids]
    assert len(ids) == len(set(ids)) == min(wanted, there)
