"""Phases of the data: masks and batches change within a pass, mixtures begin another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from data_pipeline import MASKED, Batch, BatchSizes, BatchStream, Corpus, DataConfig, MaskingConfig
from data_pipeline.config import PhaseConfig, PhaseMaskingConfig, SourceConfig
from data_pipeline.reading.lanes import SOURCE_SHIFT
from tests.data_pipeline.conftest import make_documents


def stream(corpus: Corpus, sizes: BatchSizes, *phases: PhaseConfig) -> BatchStream:
    config = DataConfig(path="unused", sequence_length=32, phases=[*phases])
    return BatchStream(corpus.split("train"), config, 1, sizes)


def test_a_new_pass_has_an_order_and_masks_of_its_own(corpus: Corpus) -> None:
    total = stream(corpus, BatchSizes.constant(1)).samples_per_epoch
    ours = stream(corpus, BatchSizes.constant(1), PhaseConfig(total, packing="full_sentences"))
    first, second = range(total), range(total, 2 * total)
    assert sorted(sample_ids(ours, first)) == sorted(sample_ids(ours, second))
    assert sample_ids(ours, first) != sample_ids(ours, second)
    rows = [ours.batch(step) for step in (*first, *second)]
    assert len({(row.epochs.item(), row.sample_ids.item()) for row in rows}) == 2 * total
    masks = {(row.sample_ids.item(), tuple(row.labels()[0] >= 0)) for row in rows}
    assert len(masks) > 1.9 * total  # of short rows, the masks of both passes may be alike


def sample_ids(of: BatchStream, steps: range) -> list[int]:
    return [of.samples(step)[1].item() for step in steps]


def masked(batch: Batch) -> list[int]:
    return (batch.targets[MASKED].labels >= 0).sum(axis=1).tolist()


def test_masks_and_batches_change_within_a_pass(corpus: Corpus) -> None:
    phase = PhaseConfig(3, masking=PhaseMaskingConfig(rate=0.5, mask_fraction=0.0), batch=8)
    sizes = BatchSizes.of({0: 4, 3: 8})
    changing, plain = stream(corpus, sizes, phase), stream(corpus, sizes)
    for step in (2, 3, 4):
        ours, theirs = changing.batch(step), plain.batch(step)
        np.testing.assert_array_equal(ours.sample_ids, theirs.sample_ids)
        np.testing.assert_array_equal(ours.epochs, theirs.epochs)
        pairs = zip(masked(theirs), masked(ours), strict=True)
        more = [2 * count < other for count, other in pairs]
        assert all(more) if step >= 3 else not any(more)
    mask = changing.vocabulary.mask
    assert (changing.batch(2).input_ids == mask).any()
    assert not (changing.batch(3).input_ids == mask).any()


def test_a_rate_of_a_phase_takes_the_place_of_a_changing_one() -> None:
    rates = MaskingConfig(rate=0.1, final_rate=0.3, final_rate_step=10)
    phases = [PhaseConfig(4, batch=8), PhaseConfig(5, masking=PhaseMaskingConfig(rate=0.05))]
    config = DataConfig(path="x", masking=rates, phases=phases)
    found = [config.masking_at(step).rate_at(step) for step in (0, 4, 5, 20)]
    assert found == pytest.approx([0.1, 0.18, 0.05, 0.05])
    assert config.highest_masking_rate == 0.3
    assert config.slots(102) == 30


def test_a_phase_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^from_step: nothing changes here; set another key"):
        PhaseConfig(4)
    with pytest.raises(ValueError, match=r"^rate: nothing changes; set this or another key"):
        PhaseConfig(4, masking=PhaseMaskingConfig())


def test_a_mixture_changes_and_a_corpus_may_come_later(
    corpus: Corpus, make_corpus: Callable[..., Corpus]
) -> None:
    other = make_corpus(make_documents(80, seed=5))
    splits = {"first": corpus.split("train"), "later": other.split("train")}
    mixture = {"first": SourceConfig("x", 1.0), "later": SourceConfig("y", 0.0)}
    phases = [
        PhaseConfig(2, mixture={"later": 3.0}),
        PhaseConfig(3, rope_theta=1e6),
        PhaseConfig(4, mixture={"first": 0.0}),
    ]
    config = DataConfig(mixture=mixture, sequence_length=32, phases=phases)
    whole = BatchStream(splits, config, 1, 8)
    of_later = []
    for step in range(5):
        batch = whole.batch(step)
        of_later.append(int((batch.sample_ids >> SOURCE_SHIFT).sum()))
        parts = [BatchStream(splits, config, 1, 8, rank, 2).batch(step) for rank in range(2)]
        joined = np.concatenate([part.input_ids for part in parts])
        np.testing.assert_array_equal(joined, batch.input_ids)
        np.testing.assert_array_equal(whole.samples(step)[1], batch.sample_ids)
    assert of_later == [0, 0, 6, 6, 8]
    assert set(whole.batch(2).sample_ids).isdisjoint(whole.batch(3).sample_ids)  # one pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": {"c": 1.0}}, r"phases\[0\].mixture: no corpus 'c' in data.mixture"),
        ({"mixture": {"a": 0.0, "b": 0.0}}, r"phases\[0\].mixture: must give a weight"),
        ({"mixture": {"a": -1.0}}, "mixture.a: must be 0"),
        (
            {"masking": PhaseMaskingConfig(random_fraction=0.5)},
            r"phases\[0\].masking: random_fraction: together with mask_fraction",
        ),
        ({"masking": PhaseMaskingConfig(rate=0.001)}, r"phases\[0\].masking.rate: 0.001 masks no"),
        (
            {"masking": PhaseMaskingConfig(mask_fraction=0.1)},
            r"phases\[0\].masking: may change only the rate",
        ),
    ],
)
def test_a_phase_that_makes_no_sense_is_named(changes, message) -> None:
    mixture = {"a": SourceConfig("x"), "b": SourceConfig("y")}
    with pytest.raises(ValueError, match=f"^{message}"):
        DataConfig(
            mixture=mixture,
            masking=MaskingConfig(on_device=True),
            phases=[PhaseConfig(5, **changes)],
        )
