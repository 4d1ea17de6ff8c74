"""Losses between states and attention matrices, against independently computed values."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from trainer.objectives import labels
from trainer.objectives.terms import attention as relations
from trainer.objectives.terms import states as losses

MASK = torch.tensor([[True, True, True], [True, True, False]])  # B = 2, L = 3
ALL = torch.ones(2, 3, dtype=torch.bool)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_label_cross_entropy_by_hand():
    """Two certain predictions, one undecided, and a row without a label."""
    logits = torch.tensor([[10.0, -10.0], [10.0, -10.0], [0.0, 0.0], [5.0, 0.0]])
    total, count = labels.label_cross_entropy(logits, torch.tensor([0, 1, 1, -100]))
    assert total.item() == pytest.approx(0 + 20 + math.log(2), abs=1e-6)
    assert count.item() == 3


def test_cosine_distance_by_hand():
    student = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], [[0.0, 2.0], [1.0, 1.0], [9, 9]]])
    teacher = torch.tensor([[[2.0, 0.0], [0.0, 1.0], [-3.0, 0]], [[0.0, 1.0], [1.0, 0.0], [0, 1]]])
    total, count = losses.cosine_distance(student, teacher, MASK)
    # Angles of 0, 90, 180, 0 and 45 degrees; the last position is padding.
    assert total.item() == pytest.approx(0 + 1 + 2 + 0 + 1 - 0.5**0.5)
    assert count.item() == 5


def test_hidden_mse_equals_torch_over_attended_positions():
    student, teacher = random(2, 3, 4), random(2, 3, 4, seed=1)
    total, count = losses.hidden_mse(student, teacher, MASK)
    assert (total / count).item() == pytest.approx(F.mse_loss(student[MASK], teacher[MASK]).item())


def test_patient_mse_is_the_original_codes():
    """PKD's loss: mse_loss of normalised states, mean over rows and width."""
    student, teacher = random(4, 6), random(4, 6, seed=1)
    rows = torch.tensor([True, True, False, True])
    total, count = losses.patient_mse(student, teacher, rows)
    ours, theirs = (
        x[rows] / x[rows].pow(2).sum(1, keepdim=True).sqrt() for x in (student, teacher)
    )
    assert (total / count).item() == pytest.approx((ours - theirs).pow(2).mean().item())


def test_patient_mse_by_hand():
    """Opposite unit vectors are 2 apart, whatever their original lengths: 4 over a width of 2."""
    student, teacher = torch.tensor([[3.0, 0.0]]), torch.tensor([[-0.1, 0.0]])
    total, _ = losses.patient_mse(student, teacher, torch.tensor([True]))
    assert total.item() == pytest.approx(4 / 2)


def moments(states):
    """Mean and variance over the width, by definition."""
    mean = states.sum(-1, keepdim=True) / states.shape[-1]
    return mean, ((states - mean) ** 2).sum(-1, keepdim=True) / states.shape[-1]


def test_mobilebert_transfers_by_their_definitions():
    student, teacher = random(2, 3, 8), 3 * random(2, 3, 8, seed=1) + 1
    (mean, variance), (their_mean, their_variance) = moments(student), moments(teacher)
    ours = (student - mean) / variance.sqrt()
    theirs = (teacher - their_mean) / their_variance.sqrt()
    expected = {
        losses.feature_map_mse: (ours - theirs).pow(2).mean(-1),
        losses.mean_difference: (mean - their_mean).pow(2).squeeze(-1),
        losses.variance_difference: (variance - their_variance).abs().squeeze(-1),
    }
    for loss, values in expected.items():
        total, count = loss(student, teacher, MASK)
        assert total.item() == pytest.approx(values[MASK].sum().item(), rel=1e-5)
        assert count.item() == 5


def test_mean_and_variance_by_hand():
    student, teacher = torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[5.0, 5.0, 8.0]]])
    mask = torch.tensor([[True]])
    # Means 2 and 6; variances 1 and 2. The widths differ.
    assert losses.mean_difference(student, teacher, mask)[0].item() == pytest.approx(16)
    assert losses.variance_difference(student, teacher, mask)[0].item() == pytest.approx(1)


def matrix(width, seed):
    """The two factors for 2 rows, 2 heads and 3 positions."""
    return tuple(random(2, 2, 3, width, seed=seed + n).requires_grad_() for n in range(2))


UNSEEN = -1e9


def plain_scores(factors, row, length, reach=3):
    """[heads, length, length] for one row without padding; `UNSEEN` farther than `reach`."""
    first, second = (x[row, :, :length] for x in factors)
    scores = torch.einsum("hqd,hkd->hqk", first, second) / math.sqrt(first.shape[-1])
    unseen = [[abs(q - k) > reach for k in range(length)] for q in range(length)]
    return scores.masked_fill(torch.tensor(unseen), UNSEEN)


def mse(student, teacher):
    """The mean over the visible pairs, times the number of all pairs."""
    seen = student[0] > UNSEEN
    return (student - teacher).pow(2).sum() / seen.sum() * seen.numel()


def cross_entropy(student, teacher):
    probabilities = teacher.exp() / teacher.exp().sum(-1, keepdim=True)
    log_probabilities = student - student.exp().sum(-1, keepdim=True).log()
    return -(probabilities * log_probabilities).sum()


def kl_divergence(student, teacher):
    return cross_entropy(student, teacher) - cross_entropy(teacher, teacher)


PLAIN = [
    (relations.attention_mse, mse, 3 * 3 + 2 * 2),
    (relations.attention_cross_entropy, cross_entropy, 5),
    (relations.relation_kl, kl_divergence, 5),
]


@pytest.mark.parametrize("window", [0, 1, 2, 8])
@pytest.mark.parametrize("score_bytes", [1, 4 * 2 * 3 * 2, 1 << 20])
@pytest.mark.parametrize(("loss", "formula", "pairs"), PLAIN)
def test_matrix_losses_row_by_row(monkeypatch, loss, formula, pairs, score_bytes, window):
    """Values and gradients against a loop over rows without padding, in blocks of any size."""
    monkeypatch.setattr(relations, "SCORE_BYTES", score_bytes)
    student, teacher = matrix(4, 0), matrix(8, 10)  # head widths differ
    reach = window // 2 if window else 3
    expected = sum(
        formula(*(plain_scores(one, row, length, reach) for one in (student, teacher))) / 2  # heads
        for row, length in enumerate([3, 2])
    )
    total, count = loss(student, teacher, MASK, window)
    assert count.item() == pairs
    torch.testing.assert_close(total, expected)
    for ours, plain in zip(
        torch.autograd.grad(3 * total, student),
        torch.autograd.grad(3 * expected, student),
        strict=True,
    ):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert all(factor.grad is None for factor in teacher)


def test_the_same_factor_twice_gets_both_gradients():
    """In value relations, both factors are V."""
    values, theirs = matrix(4, 0)[0], matrix(4, 10)[0]
    total, _ = relations.relation_kl((values, values), (theirs, theirs), ALL)
    plain = sum(
        kl_divergence(
            plain_scores((values, values), row, 3), plain_scores((theirs, theirs), row, 3)
        )
        for row in range(2)
    )
    torch.testing.assert_close(total, plain / 2)
    (ours,), (expected,) = (torch.autograd.grad(one, values) for one in (total, plain / 2))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_tinyberts_scores_for_padding_are_zero_in_both():
    """Without padding it equals the original: scores of -100 and below are 0, then the mean."""
    student, teacher = (tuple(20 * x for x in matrix(4, seed)) for seed in (0, 10))
    ours, theirs = (
        torch.stack([plain_scores(one, row, 3) for row in range(2)]) for one in (student, teacher)
    )
    assert (ours <= -1e2).any()
    expected = F.mse_loss(
        torch.where(ours <= -1e2, torch.zeros_like(ours), ours),
        torch.where(theirs <= -1e2, torch.zeros_like(theirs), theirs),
    )
    total, count = relations.attention_mse(student, teacher, ALL)
    torch.testing.assert_close(total / count, expected)


def test_attention_cross_entropy_by_hand():
    """Both attend uniformly to three keys: log 3 at each position."""
    nothing = torch.zeros(1, 1, 3, 4)
    mask = torch.tensor([[True, True, True]])
    total, count = relations.attention_cross_entropy((nothing, nothing), (nothing, nothing), mask)
    assert (total / count).item() == pytest.approx(math.log(3))
    assert relations.relation_kl((nothing, nothing), (nothing, nothing), mask)[0].item() == 0


def test_never_more_scores_than_the_bounded_block_are_alive(monkeypatch):
    """For any number of rows, including the backward pass."""
    monkeypatch.setattr(relations, "SCORE_BYTES", 4 * 2 * 8 * 4)  # four queries of two heads
    made, kept = [], relations.scaled_scores

    def scaled_scores(queries, keys):
        scores = kept(queries, keys)
        made.append(scores.numel())
        return scores

    monkeypatch.setattr(relations, "scaled_scores", scaled_scores)
    student = tuple(random(5, 2, 8, 4, seed=n).requires_grad_() for n in range(2))
    total, _ = relations.relation_kl(student, student, torch.ones(5, 8, dtype=torch.bool))
    assert max(made) == 2 * 8 * 4
    # What waits for the backward pass is as large as the factors.
    assert total.grad_fn.saved_tensors == ()
    assert [waiting.shape for waiting in total.grad_fn.gradients] == [x.shape for x in student]


def test_bfloat16_is_near_float32():
    student, teacher = matrix(16, 0), matrix(16, 10)
    exact, _ = relations.relation_kl(student, teacher, MASK)
    narrow = tuple(x.detach().bfloat16().requires_grad_() for x in student)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = relations.relation_kl(narrow, teacher, MASK)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(exact.item(), rel=0.05)
    total.backward()
    assert narrow[0].grad.dtype == torch.bfloat16
