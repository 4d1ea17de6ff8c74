"""Products in 8 bits, against roundings by hand in float32."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from model import EncoderConfig, module_of
from model.precision import E4M3, E5M2, float8_linear
from tests.conftest import TINY_JOB, tandem
from tests.trainer import tiny
from trainer.errors import TrainingError
from trainer.learner_names import TEACHER
from trainer.learners.module import require_products

BITS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}  # of fractions; least exponent; largest


def by_hand(x: torch.Tensor, form: str) -> torch.Tensor:
    """The numbers nearest to x among those of the form, times the tensor's power of two."""
    fraction, least, largest = BITS[form]
    values = x.detach().numpy().astype(np.float64)
    scale = 2.0 ** np.floor(np.log2(largest / np.abs(values).max()))
    exponents = np.maximum(np.frexp(values * scale)[1] - 1, least)
    step = 2.0 ** (exponents - fraction)
    return torch.from_numpy(np.rint(values * scale / step) * step / scale).float()


@pytest.mark.parametrize("rows", [16, 21])
def test_a_layer_and_its_gradients_are_products_of_rounded_tensors(rows):
    torch.manual_seed(1)
    x = torch.randn(3, rows, 32, requires_grad=True)
    weight = (0.02 * torch.randn(48, 32)).requires_grad_()
    bias = torch.randn(48, requires_grad=True)
    upstream = 1e-5 * torch.randn(3, rows, 48)
    y = float8_linear(x, weight, bias)
    y.backward(upstream)
    x8, weight8, g8 = by_hand(x, "e4m3"), by_hand(weight, "e4m3"), by_hand(upstream, "e5m2")
    close = {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(y, x8 @ weight8.t() + bias, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, g8 @ weight8, **close)
    torch.testing.assert_close(weight.grad, g8.flatten(0, 1).t() @ x8.flatten(0, 1), **close)
    torch.testing.assert_close(bias.grad, upstream.sum((0, 1)), **close)
    assert (y - (x @ weight.t() + bias)).norm() / y.norm() > 1e-3


def test_how_a_batch_is_cut_rounds_nothing_otherwise():
    x, weight = torch.randn(32, 32), torch.randn(16, 32)
    parts = [float8_linear(part, weight, None) for part in x.split(4)]
    torch.testing.assert_close(torch.cat(parts), float8_linear(x, weight, None))


SIZES = {"vocab_size": 64, "hidden_size": 32, "layers": 2, "heads": 2, "ffn_size": 40}


def test_only_layers_of_fitting_sizes_compute_in_8_bits():
    model = module_of(EncoderConfig(**SIZES))(EncoderConfig(**SIZES))
    model.use_float8()
    names = {
        name
        for name, part in model.named_modules()
        if getattr(part, "product", None) is float8_linear
    }
    attention = ("query", "key", "value", "output")
    assert names == {f"encoder.attention.{i}.{part}" for i in range(2) for part in attention}


def test_recomputed_layers_have_the_same_gradients():
    def gradients(recomputes: bool) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model = module_of(EncoderConfig(**SIZES))(EncoderConfig(**SIZES))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        model.use_float8()
        if recomputes:
            model.checkpoint_activations()
        with torch.autocast("cpu", torch.bfloat16):
            states = model.encode(torch.arange(32).view(2, 16)).last_hidden_state
        states.float().square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for plain, again in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, again)


def test_a_model_without_such_layers_is_refused(corpus):
    job = ("train", TINY_JOB, f"data.path={corpus}", "students.distilbert.model=bilstm")
    done = tandem(*job, "students.distilbert.precision=fp8")
    assert done.returncode == 1
    assert "students.distilbert.precision: " in done.stderr
    assert "multiply in 8 bits" in done.stderr


@pytest.mark.parametrize("format_of_first", [E4M3, E5M2])
def test_a_device_without_such_products_is_refused_in_one_line(monkeypatch, format_of_first):
    """In the forward pass, or in the backward pass only."""
    config = dataclasses.replace(tiny.learner_configs((0, 0, 0))[TEACHER], precision="fp8")
    require_products(TEACHER, config, torch.device("cpu"))
    multiply = torch._scaled_mm

    def refuse(first, *rest, **options):
        if first.dtype == format_of_first:
            raise RuntimeError("is only supported with capability >= 8.9\nraised at x.cpp")
        return multiply(first, *rest, **options)

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    why = r"^teacher\.precision: fp8 cannot be computed here \(is only .* 8\.9\); use bf16_weights$"
    with pytest.raises(TrainingError, match=why):
        require_products(TEACHER, config, torch.device("cpu"))
