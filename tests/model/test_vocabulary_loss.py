"""The chunked losses against the plain formulas in torch."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import model
from model.precision import kernels_of
from tests.model.chunked import chunked_cross_entropy
from trainer import vocabulary_projection
from trainer.fusion import fusing
from trainer.objectives.row_losses import (
    RowLoss,
    cross_entropy_rows,
    kl_divergence,
    kl_divergence_rows,
)
from trainer.objectives.terms.divergences import (
    alpha_beta,
    decoupled,
    jensen_shannon,
    sorted_distance,
)
from trainer.objectives.terms.own_predictions import squared_log_z
from trainer.objectives.terms.predictions import soft_cross_entropy
from trainer.objectives.vocabulary import chunked_kl_divergence, project_and_sum
from trainer.vocabulary_projection import Distribution, Projection

torch.set_num_threads(1)

V, E, P = 61, 12, 37


@pytest.fixture(params=[(5, 5), (37, 4), (9, 4)], ids=["chunks", "blocks", "blocks of chunks"])
def _chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the number of rows in a chunk, and in a block of it."""
    chunk, block = request.param
    monkeypatch.setattr(vocabulary_projection, "CHUNK_ELEMENTS", V * chunk)
    monkeypatch.setattr(vocabulary_projection, "BLOCK_ELEMENTS", V * block)


def tensors(width: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(width)
    shapes = [(P, width), (V, width), (V,)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [one.to(dtype).requires_grad_() for one in made]


def labels() -> Tensor:
    made = torch.randint(0, V, (P,), generator=torch.Generator().manual_seed(3))
    made[::4] = -100
    return made


def assert_same(ours: Tensor, plain: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    for got, expected in zip(
        torch.autograd.grad(ours * 0.37, inputs),
        torch.autograd.grad(plain * 0.37, inputs, retain_graph=True),
        strict=True,
    ):
        relative = (got - expected).norm() / expected.norm()
        assert relative < 1e-6


def against(teacher: list[Tensor], loss: Any, temperature: float, weights: Tensor) -> RowLoss:
    """A loss by the log-probabilities of a teacher, times the weight of each row."""
    of_teacher = Distribution(Projection(*teacher))
    return RowLoss(
        loss, weights, temperature, operands=lambda rows: (of_teacher.log_at(rows, temperature),)
    )


@pytest.mark.usefixtures("_chunk")
def test_cross_entropy_equals_the_plain_formula() -> None:
    inputs = tensors(E)
    total, count = chunked_cross_entropy(*inputs, labels())
    plain = F.cross_entropy(F.linear(*inputs), labels(), ignore_index=-100, reduction="sum")
    assert count == (labels() != -100).sum()
    assert_same(total, plain, inputs)


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_distillation_equals_the_plain_formulas(temperature: float) -> None:
    student, teacher = tensors(E), tensors(2 * E)
    weights = torch.rand(P, generator=torch.Generator().manual_seed(5))
    weights[3] = 0.0
    arguments = (student[0], (student[1], student[2]), teacher[0], (teacher[1], teacher[2]))

    log_q = F.log_softmax(F.linear(*student) / temperature, -1)
    log_p = F.log_softmax(F.linear(*teacher) / temperature, -1)
    plain_kl = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) @ weights
    plain_ce = -(log_p.exp() * log_q).sum(-1) @ weights

    total, count = chunked_kl_divergence(*arguments, temperature, weights)
    torch.testing.assert_close(count, weights.sum())
    assert_same(total, plain_kl, student)
    soft = against(teacher, soft_cross_entropy, temperature, weights)
    total, _ = project_and_sum(student[0], (student[1], student[2]), [soft])
    assert_same(total, plain_ce, student)
    assert all(tensor.grad is None for tensor in teacher)


@pytest.mark.usefixtures("_chunk")
def test_gradients_written_by_hand_are_those_of_autograd() -> None:
    student, teacher = tensors(E), tensors(2 * E)
    weights = torch.rand(P, generator=torch.Generator().manual_seed(5))
    of_teacher = Distribution(Projection(*teacher))
    losses = [cross_entropy_rows(labels()), kl_divergence_rows(of_teacher, 2.5, weights)]
    assert all(one.target is not None for one in losses)
    plain = [dataclasses.replace(one, target=None) for one in losses]
    decoder = (student[1], student[2])
    for scales in ((2.0, 0.5), (0.3, 4.0)):
        total, sums = project_and_sum(student[0], decoder, losses, scales)
        for others in (plain, [losses[0], plain[1]], [plain[0], losses[1]]):
            other, other_sums = project_and_sum(student[0], decoder, others, scales)
            torch.testing.assert_close(sums, other_sums, rtol=1e-6, atol=0)
            gradients = torch.autograd.grad(other, student)
            for got, one in zip(torch.autograd.grad(total, student), gradients, strict=True):
                assert (got - one).norm() < 1e-6 * one.norm()
            total, _ = project_and_sum(student[0], decoder, losses, scales)


def plain_jensen_shannon(p: Tensor, q: Tensor, _: Tensor) -> Tensor:
    """From the definition, b = 0.3."""
    m = 0.3 * p + 0.7 * q
    return 0.3 * (p * (p / m).log()).sum(-1) + 0.7 * (q * (q / m).log()).sum(-1)


def plain_alpha_beta(p: Tensor, q: Tensor, _: Tensor) -> Tensor:
    """Cichocki's definition, alpha = 0.7 and beta = 0.4."""
    inner = p**0.7 * q**0.4 - 0.7 / 1.1 * p**1.1 - 0.4 / 1.1 * q**1.1
    return -inner.sum(-1) / (0.7 * 0.4)


def plain_decoupled(p: Tensor, q: Tensor, label: Tensor) -> Tensor:
    """The original code's two parts, a row at a time; alpha = 2 and beta = 8."""
    losses = []
    for theirs, ours, one in zip(p, q, label.tolist(), strict=True):
        rest = torch.arange(V) != one
        pairs = (torch.stack([x[one], x[rest].sum()]) for x in (theirs, ours))
        others = (x[rest] / x[rest].sum() for x in (theirs, ours))
        parts = [F.kl_div(b.log(), a, reduction="sum") for a, b in (pairs, others)]
        losses.append(2 * parts[0] + 8 * parts[1])
    return torch.stack(losses)


DIVERGENCES = {
    "sorted probabilities": (
        lambda log_q, log_p, _: sorted_distance(log_q, log_p),
        lambda p, q, _: torch.stack(
            [(a.sort()[0] - b.sort()[0]).abs().sum() for a, b in zip(p, q, strict=True)]
        ),
    ),
    "reverse KL": (
        lambda log_q, log_p, _: kl_divergence(log_p, log_q),
        lambda p, q, _: (q * (q / p).log()).sum(-1),
    ),
    "Jensen-Shannon": (
        lambda log_q, log_p, _: jensen_shannon(log_q, log_p, 0.3),
        plain_jensen_shannon,
    ),
    "alpha-beta": (lambda log_q, log_p, _: alpha_beta(log_q, log_p, 0.7, 0.4), plain_alpha_beta),
    "decoupled": (lambda log_q, log_p, one: decoupled(log_q, log_p, one, 2, 8), plain_decoupled),
}


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_equals_the_plain_formula(name: str) -> None:
    loss, formula = DIVERGENCES[name]
    student, teacher = ([0.5 * one for one in tensors(width)] for width in (E, 2 * E))
    student = [one.detach().requires_grad_() for one in student]
    label, weights = labels().clamp(min=0), (labels() >= 0).float()
    of_teacher = Distribution(Projection(*teacher))

    def operands(rows: slice) -> tuple[Tensor, Tensor]:
        return of_teacher.log_at(rows, 2.0), label[rows]

    rows = RowLoss(loss, weights, 2.0, operands=operands)
    total, _ = project_and_sum(student[0], (student[1], student[2]), [rows])
    p, q = (F.softmax(F.linear(*one) / 2.0, -1) for one in (teacher, student))
    assert_same(total, formula(p.detach(), q, label) @ weights, student)


def test_a_divergence_from_itself_is_nothing() -> None:
    log_p = F.log_softmax(torch.randn(4, 9, generator=torch.Generator().manual_seed(0)), -1)
    for loss, _ in DIVERGENCES.values():
        torch.testing.assert_close(
            loss(log_p, log_p, torch.tensor([0, 3, 8, 1])), torch.zeros(4), atol=1e-6, rtol=0
        )


def test_tokens_that_a_teacher_leaves_out_have_finite_losses() -> None:
    """For all divergences but that of the student from the teacher."""
    logits = torch.full((2, V), vocabulary_projection.ABSENT)
    logits[:, :3] = torch.tensor([1.0, 0.0, -1.0])
    log_p = F.log_softmax(logits, -1)
    for name, (loss, _) in DIVERGENCES.items():
        log_q = torch.zeros(2, V).log_softmax(-1).requires_grad_()
        value = loss(log_q, log_p, torch.tensor([0, 5])).sum()
        (gradient,) = torch.autograd.grad(value, log_q)
        is_finite = bool(value.abs() < 1e3) and bool(gradient.isfinite().all())
        assert is_finite != (name == "reverse KL")


@pytest.mark.parametrize(
    ("keep", "room", "projections"), [(False, V * P, 6), (True, V * P, 3), (True, V * 13, 5)]
)
def test_a_distribution_is_the_same_kept_or_not(
    keep: bool, room: int, projections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For two readers of three chunks, with none kept, all kept, or the one that fits."""
    monkeypatch.setattr(vocabulary_projection, "CHUNK_ELEMENTS", V * 13)
    monkeypatch.setattr(vocabulary_projection, "KEPT_ELEMENTS", room)
    teacher = tensors(E)
    distribution = Distribution(Projection(*teacher), keep=keep)
    made = []
    project = Projection.logits
    monkeypatch.setattr(Projection, "logits", lambda *a: made.append(1) or project(*a))
    plain = F.softmax(F.linear(*teacher) / 2.0, -1).detach()
    for _ in range(2):
        for rows in (slice(0, 9), slice(9, 13), slice(13, 26), slice(26, 37)):
            p, negative_entropy = distribution.at(rows, 2.0)
            torch.testing.assert_close(p, plain[rows])
            torch.testing.assert_close(negative_entropy, (plain * plain.log()).sum(-1)[rows])
    assert len(made) == projections


def test_on_a_gpu_16_bit_products_are_of_a_padded_vocabulary() -> None:
    """The operands are bfloat16's; results are near those in float32, and of the real tokens."""
    student, losses = tensors(E, torch.bfloat16), [cross_entropy_rows(labels())]
    exact = [tensor.detach().float().requires_grad_() for tensor in student]
    with kernels_of("cuda"):
        assert Projection(*student).weight.shape == (vocabulary_projection.ALIGNED, E)
        found, _ = project_and_sum(student[0], (student[1], student[2]), losses)
    plain, _ = project_and_sum(exact[0], (exact[1], exact[2]), losses)
    torch.testing.assert_close(found, plain, rtol=1e-2, atol=0.0)
    for got, expected in zip(
        torch.autograd.grad(found, student), torch.autograd.grad(plain, exact), strict=True
    ):
        assert (got.float() - expected).norm() < 1e-2 * expected.norm()


def fused_and_not(student: list[Tensor], teacher: list[Tensor], factor: float) -> Any:
    """Two chunks of three losses at two temperatures, both ways: (sums, loss, gradients)."""
    masked = factor * (labels() >= 0).float()
    losses = [
        kl_divergence_rows(Distribution(Projection(*teacher)), 1.0 + factor, masked),
        cross_entropy_rows(labels()),
        RowLoss(squared_log_z, masked, of_logits=True),
    ]
    for options in (None, {"backend": "aot_eager", "dynamic": False}):
        with fusing(options):
            scales = factor, 2.0, 0.1
            total, sums = project_and_sum(student[0], (student[1], student[2]), losses, scales)
            yield sums, total, *torch.autograd.grad(total, student)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 1e-6),
        (torch.bfloat16, 1e-2),
        pytest.param(torch.float16, 2e-3, marks=pytest.mark.slow),
    ],
)
def test_fused_losses_are_the_others(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a padded vocabulary, and with temperatures and weights of each step."""
    monkeypatch.setattr(vocabulary_projection, "CHUNK_ELEMENTS_ON_GPU", V * 20)
    student, teacher = tensors(E, dtype), tensors(2 * E, dtype)
    graphs = []
    with kernels_of("cuda"):
        for factor in (0.5, 2.5):
            plain, found = fused_and_not(student, teacher, factor)
            for got, expected in zip(found, plain, strict=True):
                assert (got - expected).norm() < tolerance * expected.norm()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0


@pytest.mark.usefixtures("_chunk")
def test_losses_that_share_a_projection_are_what_they_are_alone() -> None:
    """For three at once: the weighted sum with its gradients, and each loss's own sum."""
    student, teacher = tensors(E), tensors(2 * E)
    decoders = (student[1], student[2]), (teacher[1], teacher[2])
    masked = (labels() >= 0).float()
    scales = (2.0, 5.0, 0.25)
    together = [
        cross_entropy_rows(labels()),
        kl_divergence_rows(Distribution(Projection(*teacher)), 2.0, masked),
        against(teacher, soft_cross_entropy, 1.0, masked),
    ]
    total, sums = project_and_sum(student[0], decoders[0], together, scales)
    arguments = (student[0], decoders[0], teacher[0], decoders[1])
    alone = [
        chunked_cross_entropy(*student, labels())[0],
        chunked_kl_divergence(*arguments, 2.0, masked)[0],
        project_and_sum(student[0], decoders[0], [together[2]])[0],
    ]
    assert not sums.requires_grad
    torch.testing.assert_close(sums, torch.stack(alone).detach(), rtol=1e-6, atol=0)
    for got, separate in zip(
        torch.autograd.grad(total, student),
        zip(*(torch.autograd.grad(one, student) for one in alone), strict=True),
        strict=True,
    ):
        expected = sum(scale * one for scale, one in zip(scales, separate, strict=True))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    exact = sum(scale * one.detach() for scale, one in zip(scales, alone, strict=True))
    torch.testing.assert_close(total.detach(), exact)


@pytest.mark.usefixtures("_chunk")
def test_under_autocast_it_equals_float32_to_bfloat16_precision() -> None:
    inputs = tensors(E)
    exact, _ = chunked_cross_entropy(*inputs, labels())
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = chunked_cross_entropy(*inputs, labels())
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, exact, rtol=1e-2, atol=0)
    for got, expected in zip(
        torch.autograd.grad(total, inputs), torch.autograd.grad(exact, inputs), strict=True
    ):
        assert got.dtype == torch.float32
        assert (got - expected).norm() / expected.norm() < 2e-2


def test_gradients_that_float16_would_round_off_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tokens of tiny probability, where the products are in float16."""
    monkeypatch.setattr(vocabulary_projection, "is_native", lambda device, dtype: True)
    x, weight, bias = tensors(E)
    rare = torch.arange(V) % 2 == 1
    with torch.no_grad():
        weight.mul_(0.1)
        bias[rare] = -10.0  # a probability of 1e-6 or so
    inputs = [x, weight, bias]
    targets = labels() // 2 * 2
    targets[labels() < 0] = -100
    exact, _ = chunked_cross_entropy(*inputs, targets)
    with torch.autocast("cpu", torch.float16):
        total, _ = chunked_cross_entropy(*inputs, targets)
    scale = 2.0**12  # what the loss is multiplied by comes later
    ours = [gradient / scale for gradient in torch.autograd.grad(total * scale, inputs)]
    for got, expected in zip(ours, torch.autograd.grad(exact, inputs), strict=True):
        assert (got - expected).norm() / expected.norm() < 2e-3
        if len(got) == V:
            assert (got[rare] - expected[rare]).norm() / expected[rare].norm() < 1e-2


def test_in_float64_it_is_exact_to_float64() -> None:
    inputs = tensors(3, torch.float64)
    total, _ = chunked_cross_entropy(*inputs, labels())
    plain = F.cross_entropy(F.linear(*inputs), labels(), ignore_index=-100, reduction="sum")
    torch.testing.assert_close(total, plain, rtol=1e-13, atol=0)
    for got, expected in zip(
        torch.autograd.grad(total, inputs), torch.autograd.grad(plain, inputs), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-13)


def test_rows_that_weigh_nothing_change_nothing() -> None:
    inputs = tensors(E)
    none = torch.full((P,), -100)
    total, count = chunked_cross_entropy(*inputs, none)
    total.backward()
    assert total == 0
    assert count == 0
    assert all(one.grad is not None and not one.grad.any() for one in inputs)


def test_without_gradients_nothing_is_computed_for_them() -> None:
    x, weight, bias = tensors(E)
    with torch.no_grad():
        total, _ = chunked_cross_entropy(x, weight, bias, labels())
    assert not total.requires_grad
    only_input, _ = chunked_cross_entropy(x, weight.detach(), None, labels())
    only_input.backward()
    assert x.grad is not None


def test_never_more_than_the_bounded_chunk_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_projection, "CHUNK_ELEMENTS", V * 5)
    largest = 0
    kept = Projection.logits

    def logits(self: Projection, rows: slice, out: Tensor) -> Tensor:
        nonlocal largest
        made = kept(self, rows, out)
        largest = max(largest, made.numel())
        return made

    monkeypatch.setattr(Projection, "logits", logits)
    chunked_cross_entropy(*tensors(E), labels())[0].backward()
    assert 0 < largest <= V * 5


def test_the_training_path_equals_the_loss_of_the_full_logits() -> None:
    ours = model.build(model.EncoderConfig(V, 32, 2, 2, 48, dropout=0, attention_dropout=0), 1)
    ids = torch.randint(0, V, (2, 9), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([1, 4, 11, 0])
    targets = torch.tensor([5, 6, 7, -100])

    found = ours.features(ids, masked_positions=positions)
    total, count = chunked_cross_entropy(found.vocabulary_input, *ours.output_projection(), targets)
    (total / count).backward()
    got = {name: p.grad.clone() for name, p in ours.named_parameters() if p.grad is not None}
    ours.zero_grad()
    dense = torch.full((18,), -100)
    dense[positions[:3]] = targets[:3]
    plain = F.cross_entropy(ours(ids).logits.flatten(0, 1), dense)
    plain.backward()
    torch.testing.assert_close(total / count, plain)
    for name, parameter in ours.named_parameters():
        if parameter.grad is None or name.endswith("key.bias"):  # its true gradient is zero
            continue
        difference = (got[name] - parameter.grad).norm()
        assert difference <= 1e-5 * parameter.grad.norm(), name
