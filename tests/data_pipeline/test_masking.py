"""Masks: exact budgets, no special tokens, pure functions, distributions as in the papers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import ConfigError, typed
from data_pipeline import DataConfig, MaskingConfig, PhaseConfig
from data_pipeline.hashing import array_keys
from data_pipeline.masking import words as word_masking
from data_pipeline.masking.masker import Masked, Masker
from data_pipeline.masking.torch_masker import TorchMasker
from data_pipeline.tokenization.tokenizer import Vocabulary

VOCABULARY = Vocabulary(
    vocab_size=1000, pad=0, cls=2, sep=3, mask=4, special=(0, 1, 2, 3, 4, 999), fingerprint=""
)
COUNTS = np.random.default_rng(0).integers(1, 10**6, 1000)
WORD_STARTS = np.arange(1000) % 3 != 0  # every third id continues a word


def sequences(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """[CLS] text [SEP] text [SEP] and padding of random lengths."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(5, 999, (rows, length))
    used = draw.integers(3, length + 1, rows)
    ids[:, 0] = VOCABULARY.cls
    ids[np.arange(rows), used // 2] = VOCABULARY.sep
    ids[np.arange(rows), used - 1] = VOCABULARY.sep
    ids[np.arange(length) >= used[:, None]] = VOCABULARY.pad
    return ids


def masked(ids: np.ndarray, seed: int = 1, step: int = 0, epoch: int = 0, **options) -> Masked:
    masker = Masker(seed, MaskingConfig(**options), VOCABULARY, ids.shape[1], COUNTS, WORD_STARTS)
    rows = np.arange(len(ids))
    return masker(ids, np.full(len(ids), epoch), rows * 7, step)


def chosen(result: Masked) -> np.ndarray:
    """Which columns were chosen, [R, L]."""
    table = np.zeros(result.input_ids.shape, bool)
    row, slot = np.nonzero(result.labels != -100)
    table[row, result.positions[row, slot]] = True
    return table


KINDS = [
    {},
    {"smoothing": 0.7},
    {"unit": "word"},
    {"unit": "ngram"},
    {"copies": 3},
    {"rate": 0.3, "final_rate": 0.15, "final_rate_step": 100},
]


@given(
    st.sampled_from(KINDS),
    st.integers(0, 2**63),
    st.integers(1, 12),
    st.integers(8, 80),
    st.floats(0, 1),
)
@settings(max_examples=80)
def test_what_holds_for_every_mask(kind, seed, rows, length, rate) -> None:
    ids = sequences(rows, length, seed % 1000)
    options = {"rate": rate} | kind
    result = masked(ids, seed, **options)
    table = chosen(result)
    maskable = ~VOCABULARY.is_special[ids]
    budget = np.rint(options["rate"] * maskable.sum(1))
    assert not table[~maskable].any()
    if kind.get("unit", "token") == "token":
        np.testing.assert_array_equal(table.sum(1), budget)
    else:
        assert (table.sum(1) <= budget).all()
    np.testing.assert_array_equal(result.input_ids[~table], ids[~table])
    used = result.labels != -100
    np.testing.assert_array_equal(
        np.take_along_axis(ids, result.positions, 1)[used], result.labels[used]
    )
    assert (result.positions[~used] == 0).all()
    assert (np.diff(np.where(used, result.positions, length), axis=1)[used[:, 1:]] > 0).all()
    changed = result.input_ids[table & (result.input_ids != ids)]
    assert (~VOCABULARY.is_special[changed] | (changed == VOCABULARY.mask)).all()


def test_rows_do_not_depend_on_their_neighbours() -> None:
    ids = sequences(16, 64)
    for kind in KINDS:
        whole = masked(ids, **kind)
        masker = Masker(1, MaskingConfig(**kind), VOCABULARY, 64, COUNTS, WORD_STARTS)
        for row in range(16):
            alone = masker(ids[row : row + 1], np.zeros(1, int), np.array([row * 7]))
            np.testing.assert_array_equal(alone.input_ids[0], whole.input_ids[row])


def test_every_position_alike_and_80_10_10() -> None:
    ids = np.full((4000, 66), 7)
    ids[:, 0], ids[:, -1] = VOCABULARY.cls, VOCABULARY.sep
    result = masked(ids)
    table = chosen(result)
    assert (table.sum(1) == 10).all()
    by_column = table.sum(0)[1:-1]
    chi_square = ((by_column - by_column.mean()) ** 2 / by_column.mean()).sum()
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5
    shown = result.input_ids[table]
    total = len(shown)
    shares = [(shown == 4).sum(), ((shown != 4) & (shown != 7)).sum(), (shown == 7).sum()]
    for share, expected in zip(shares, (0.8, 0.1, 0.1), strict=True):
        assert abs(share / total - expected) < 4 * (expected * (1 - expected) / total) ** 0.5 + 2e-4
    random_ids = shown[(shown != 4) & (shown != 7)]
    assert len(np.unique(random_ids)) > 0.95 * (1 - np.exp(-len(random_ids) / 994)) * 994


GOLDEN = {  # unit -> what the model sees, columns, labels
    "token": (
        [2, 100, 101, 4, 4, 104, 105, 106, 107, 264, 109, 4, 4, 3, 0, 0],
        [3, 4, 9, 11, 12, 0],
        [102, 103, 108, 110, 111, -100],
    ),
    "word": (
        [2, 4, 101, 102, 4, 4, 105, 106, 107, 108, 109, 110, 111, 3, 0, 0],
        [1, 4, 5, 6, 7, 0],
        [100, 103, 104, 105, 106, -100],
    ),
    "ngram": (
        [2, 4, 101, 102, 103, 104, 105, 106, 4, 264, 4, 110, 111, 3, 0, 0],
        [1, 7, 8, 9, 10, 0],
        [100, 106, 107, 108, 109, -100],
    ),
}


@pytest.mark.parametrize("unit", GOLDEN)
def test_masks_never_change_between_versions(unit: str) -> None:
    """If any of these numbers changes, running jobs can no longer resume."""
    result = masked(np.array([[2, *range(100, 112), 3, 0, 0]]), rate=0.4, unit=unit)
    found = result.input_ids[0], result.positions[0], result.labels[0]
    assert tuple(one.tolist() for one in found) == GOLDEN[unit]


def test_dynamic_static_and_scheduled() -> None:
    ids = sequences(64, 64)
    assert (chosen(masked(ids, epoch=0)) != chosen(masked(ids, epoch=1))).any()
    assert (chosen(masked(ids, seed=1)) != chosen(masked(ids, seed=1 + 2**32))).any()
    fixed = [masked(ids, epoch=epoch, copies=3).input_ids for epoch in range(7)]
    np.testing.assert_array_equal(fixed[0], fixed[3])
    np.testing.assert_array_equal(fixed[1], fixed[4])
    assert (fixed[0] != fixed[1]).any()
    schedule = {"rate": 0.3, "final_rate": 0.15, "final_rate_step": 1000}
    maskable = (~VOCABULARY.is_special[ids]).sum(1)
    for step, rate in ((0, 0.3), (500, 0.225), (1000, 0.15), (9999, 0.15)):
        result = masked(ids, step=step, **schedule)
        np.testing.assert_array_equal(chosen(result).sum(1), np.rint(rate * maskable))
        assert result.positions.shape[1] == np.rint(0.3 * 62)


def test_a_schedule_that_is_rounded_beyond_its_end_keeps_its_slots() -> None:
    """0.03 + (0.3 - 0.03) exceeds 0.3, which matters where the budget is 4.5 tokens."""
    schedule = {"rate": 0.03, "final_rate": 0.3, "final_rate_step": 10}
    ids = np.full((1, 17), 7)
    ids[:, 0], ids[:, -1] = VOCABULARY.cls, VOCABULARY.sep
    for unit in ("token", "word", "ngram"):
        assert chosen(masked(ids, step=10, unit=unit, **schedule)).sum() == 4


def words_of(ids: np.ndarray) -> list[list[int]]:
    """The columns of each word in one sequence, by a plain loop."""
    found: list[list[int]] = []
    for column, number in enumerate(ids):
        if VOCABULARY.is_special[number]:
            continue
        if WORD_STARTS[number] or VOCABULARY.is_special[ids[column - 1]]:
            found.append([])
        found[-1].append(column)
    return found


@pytest.mark.parametrize("unit", ["word", "ngram"])
def test_words_are_chosen_whole_and_fill_the_budget(unit: str) -> None:
    ids = sequences(200, 96, 3)
    table = chosen(masked(ids, unit=unit))
    budgets = np.rint(0.15 * (~VOCABULARY.is_special[ids]).sum(1))
    for row in range(len(ids)):
        for word in words_of(ids[row]):
            assert len(set(table[row, word].tolist())) == 1
    filled = table.sum(1).sum() / budgets.sum()
    assert 0.9 < filled <= 1


def test_ngrams_have_albert_s_lengths() -> None:
    """One n-gram per sequence, so that none is shortened or joined to a neighbour."""
    ids = np.full((6000, 42), 7)  # all words of one token
    ids[:, 0], ids[:, -1] = VOCABULARY.cls, VOCABULARY.sep
    table = chosen(masked(ids, unit="ngram", rate=0.075))  # a budget of 3 tokens
    first = np.argmax(table, axis=1)
    run = table[np.arange(6000), first + 1] * (1 + table[np.arange(6000), first + 2])
    assert set(run.tolist()) == {0, 1, 2}
    # A lone 3-gram fills the budget: its share is that of first draws, plus runs by chance.
    assert abs((run == 2).mean() - (1 / 3) / (1 + 1 / 2 + 1 / 3)) < 0.06
    assert (table.sum(1) == 3).mean() > 0.99


def test_ngrams_do_not_cross_separators() -> None:
    ids = np.full((3000, 13), 7)
    ids[:, 0], ids[:, 4], ids[:, -1] = VOCABULARY.cls, VOCABULARY.sep, VOCABULARY.sep
    table = chosen(masked(ids, unit="ngram", rate=0.2, max_ngram=2))  # a budget of 2 tokens
    both = table[:, 3] & table[:, 5]
    apart = table[:, 2] & table[:, 6]
    assert both.mean() < 2 * apart.mean() + 0.02


def test_smoothing_prefers_rare_tokens_as_distilbert_does() -> None:
    """For one token of each sequence: its probability is count**-0.7 over their sum."""
    rows, length = 20000, 12
    ids = np.tile(np.arange(100, 100 + length), (rows, 1))
    ids[:, 0], ids[:, -1] = VOCABULARY.cls, VOCABULARY.sep
    table = chosen(masked(ids, smoothing=0.7, rate=0.1))
    assert (table.sum(1) == 1).all()
    weights = COUNTS[100 : 100 + length] ** -0.7
    weights[[0, -1]] = 0
    expected = weights / weights.sum()
    assert np.abs(table.mean(0) - expected).max() < 5 * (0.25 / rows) ** 0.5


on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 2**40), kind=st.sampled_from([0, 2, 4, 5]))
@settings(max_examples=30)
def test_torch_makes_the_same_token_masks(device: str, seed: int, epoch: int, kind: int) -> None:
    options = KINDS[kind] if kind in (0, 4, 5) else {"rate": 0.4, "random_fraction": 0.15}
    ids = sequences(9, 50, seed % 100)
    samples = (np.arange(9) << 48) + seed % 2**40
    epochs = np.full(9, epoch)
    config = MaskingConfig(**options)
    host = Masker(seed, config, VOCABULARY, 50, COUNTS, WORD_STARTS)
    expected, left = host(ids, epochs, samples, 30), host.defer(ids, 30)
    np.testing.assert_array_equal(left.input_ids, ids)
    np.testing.assert_array_equal(left.to_mask, (expected.labels != -100).sum(1))
    arrays = (ids, epochs, samples, left.to_mask)
    tensors = [torch.from_numpy(array).to(device) for array in arrays]
    found = TorchMasker(seed, config, VOCABULARY)(*tensors, left.positions.shape[1])
    for name in ("input_ids", "positions", "labels"):
        np.testing.assert_array_equal(getattr(found, name).cpu().numpy(), getattr(expected, name))


def test_configs_that_cannot_be() -> None:
    for options, key in (
        ({"rate": 1.5}, "rate"),
        ({"unit": "letter"}, "unit"),
        ({"final_rate": 0.1}, "final_rate_step"),
        ({"final_rate_step": 100}, "final_rate_step: is for final_rate; set that too"),
        ({"unit": "word", "max_ngram": 2}, "max_ngram: is for unit"),
        ({"smoothing": 0.7, "unit": "word"}, "smoothing"),
        ({"mask_fraction": 0.95}, "random_fraction"),
        ({"copies": -1}, "copies"),
    ):
        with pytest.raises(ValueError, match=f"^{key}"):
            MaskingConfig(**options)


def by_a_plain_loop(found, order, lengths, budget: int, row: int) -> set[int]:
    """The columns that are chosen in one row, one visit at a time."""
    spans = [
        range(start, start + size)
        for start, size in zip(found.columns[row].tolist(), found.sizes[row].tolist(), strict=True)
    ]
    taken: set[int] = set()
    for word in order[row, : np.count_nonzero(found.sizes[row])].tolist():
        n = int(lengths[row, word])
        while n and sum(map(len, spans[word : word + n])) > budget - len(taken):
            n -= 1
        wanted = {column for span in spans[word : word + n] for column in span}
        if not wanted & taken:
            taken |= wanted
    return taken


@given(
    st.integers(0, 2**32),
    st.integers(4, 90),
    st.floats(0, 1),
    st.sampled_from([1, 2, 3, 6]),
)
@settings(max_examples=150)
def test_words_and_ngrams_are_taken_as_by_a_plain_loop(seed, length, rate, longest) -> None:
    ids = sequences(5, length, seed % 1000)
    maskable = ~VOCABULARY.is_special[ids]
    starts = maskable & (WORD_STARTS[ids] | ~np.roll(maskable, 1, axis=1))
    keys = array_keys(seed, np.arange(5))
    budget = np.rint(rate * maskable.sum(1)).astype(np.int64)
    chosen_rows, columns = word_masking.choose_words(keys, starts, maskable, budget, longest)
    found = word_masking.find_words(starts, maskable, longest)
    order = word_masking.visiting_order(keys, found)
    lengths = all_lengths(keys, found, longest)
    for row in range(5):
        assert [list(range(c, c + s)) for c, s in words_with_sizes(found, row)] == words_of(
            ids[row]
        )
        expected = by_a_plain_loop(found, order, lengths, int(budget[row]), row)
        assert columns[chosen_rows == row].tolist() == sorted(expected)


def test_ngrams_of_very_long_rows_do_not_overlap() -> None:
    """Of words up to the 80,000th, the same visits are taken as of as many from the first on."""
    draw = np.random.default_rng(0)
    first = draw.permutation(20_000).astype(np.int32)[None]
    n = draw.integers(1, 4, first.shape).astype(np.int32)
    near, far = (
        word_masking._non_overlapping(words, n, 3) for words in (first, first + np.int32(60_000))
    )
    assert near.any()
    assert (far == near).all()


def all_lengths(keys, found, longest: int):
    """The n-gram lengths at every word, [R, W]."""
    rows = np.arange(len(keys))
    words = np.broadcast_to(np.arange(found.width), (len(keys), found.width))
    return word_masking.NgramLengths(keys, found, longest).at(rows, words)


def words_with_sizes(found, row: int) -> list[tuple[int, int]]:
    count = np.count_nonzero(found.sizes[row])
    columns, sizes = found.columns[row, :count].tolist(), found.sizes[row, :count].tolist()
    return list(zip(columns, sizes, strict=True))


def test_ngram_lengths_are_albert_s_also_at_the_end_of_a_segment() -> None:
    """Among the lengths that fit, in proportion to 1/n."""
    ids = np.full((20000, 8), 7)
    ids[:, 0] = ids[:, 4] = ids[:, -1] = VOCABULARY.sep  # three words, then two
    maskable = ~VOCABULARY.is_special[ids]
    found = word_masking.find_words(maskable, maskable, 3)
    lengths = all_lengths(array_keys(3, np.arange(20000)), found, 3)
    for word, room in enumerate((3, 2, 1, 2, 1)):
        shares = np.bincount(lengths[:, word], minlength=4)[1:] / 20000
        weights = np.array([1 / n if n <= room else 0 for n in (1, 2, 3)])
        assert np.abs(shares - weights / weights.sum()).max() < 0.02


@pytest.mark.parametrize(
    ("masking", "key"),
    [
        ({"rate": 0.05}, "rate"),
        ({"final_rate": 0.01, "final_rate_step": 9}, "final_rate"),
        ({"held_out_rate": 0.05}, "held_out_rate"),
    ],
)
def test_a_rate_that_masks_no_token_is_refused(masking: dict, key: str) -> None:
    with pytest.raises(ValueError, match=rf"masking\.{key}: 0\.0\d masks no token of .* of 8;"):
        DataConfig(path="corpus", sequence_length=8, masking=MaskingConfig(**masking))
    phases = [PhaseConfig(from_step=5, sequence_length=8)]
    with pytest.raises(ValueError, match=rf"masking\.{key}: "):
        DataConfig(path="corpus", masking=MaskingConfig(**masking), phases=phases)


def test_held_out_text_is_not_masked_at_a_rate_of_0() -> None:
    """It was masked at the rate of training, as if the key were not there."""
    with pytest.raises(ConfigError, match=r"data\.masking\.held_out_rate: must be "):
        typed.build({"masking": {"held_out_rate": 0}}, DataConfig, "data")
