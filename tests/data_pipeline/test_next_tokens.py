"""Next tokens as labels: which positions predict, in which phases, and what is refused."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from data_pipeline import NO_LABEL, BatchStream, DataConfig
from data_pipeline.config import PhaseConfig, PhaseMaskingConfig
from data_pipeline.masking.config import MaskingConfig

CAUSAL = MaskingConfig(unit="next_token")
NEXT = PhaseMaskingConfig(unit="next_token")
THEN_MASKS = [PhaseConfig(3, masking=PhaseMaskingConfig(unit="token", rate=0.4))]


@pytest.mark.parametrize("packing", ["full_sentences", "best_fit"])
def test_each_token_is_predicted_by_the_one_before_it(corpus, packing: str) -> None:
    config = DataConfig(path="x", sequence_length=128, packing=packing, masking=CAUSAL)
    stream = BatchStream(corpus.split("train"), config, seed=1, batch_sizes=8)
    batch, vocabulary = stream.batch(0), stream.vocabulary
    assert batch.is_causal
    labels = batch.labels()
    for ids, documents, row in zip(batch.input_ids, batch.documents, labels, strict=True):
        for at, label in enumerate(row):
            is_same_text = at + 1 < len(ids) and documents[at] == documents[at + 1] != 0
            is_word = is_same_text and ids[at + 1] != vocabulary.cls
            is_unknown = is_word and vocabulary.is_special[ids[at + 1]]
            is_unknown &= is_word and ids[at + 1] != vocabulary.sep
            expected = ids[at + 1] if is_word and not is_unknown else NO_LABEL
            assert label == expected
    assert (labels != NO_LABEL).sum() > 800
    if packing == "best_fit":
        assert batch.documents.max() > 1


def test_a_phase_masks_where_the_one_before_predicts_next_tokens(corpus) -> None:
    config = DataConfig(path="x", sequence_length=32, masking=CAUSAL, phases=THEN_MASKS)
    masks = dataclasses.replace(config, masking=MaskingConfig(rate=0.4), phases=[])
    ours, theirs = (
        BatchStream(corpus.split("train"), it, seed=1, batch_sizes=4) for it in (config, masks)
    )
    for step in range(5):
        batch, masked = ours.batch(step), theirs.batch(step)
        assert batch.is_causal == (step < 3)
        assert (batch.sample_ids == masked.sample_ids).all()
        assert np.array_equal(batch.labels(), masked.labels()) == (step >= 3)
    assert (config.has_next_tokens, config.highest_masking_rate) == (True, 1.0)
    assert config.held_out_masking.rate == 0.4
    assert [config.scores_next_tokens_at(step) for step in (2, 3)] == [True, False]
    assert not dataclasses.replace(config, phases=[]).scores_next_tokens_at(2)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            {"masking": MaskingConfig(unit="next_token", rate=0.4)},
            "masking.rate: is for masks, and unit: next_token has none; remove it",
        ),
        (
            {"masking": CAUSAL, "packing": "sentence_pair", "phases": THEN_MASKS},
            "masking.unit: next_token does not go with pairs, as packing: sentence_pair",
        ),
        (
            {"packing": "sentence_pair", "phases": [PhaseConfig(2, masking=NEXT)]},
            "phases[0].masking.unit: next_token does not go with pairs, as packing: sentence_pair",
        ),
    ],
)
def test_settings_without_effect_or_meaning_are_refused(settings, why: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(why) + "$"):
        DataConfig(path="x", sequence_length=32, **settings)


def test_a_phase_of_next_tokens_has_no_masks() -> None:
    with pytest.raises(ValueError, match="rate: is for masks; set it in a phase that has them"):
        PhaseMaskingConfig(unit="next_token", rate=0.3)
