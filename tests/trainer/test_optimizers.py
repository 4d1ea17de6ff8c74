"""LAMB against its formula; skipped steps; parameter groups."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from configs.kinds import kinds_of
from model.config import EncoderConfig
from model.initialisation import skeleton
from trainer.checkpoint.layout import Piece
from trainer.checkpoint.manifest import TensorRecord
from trainer.checkpoint.reader import resumed_states
from trainer.checkpoint.snapshot import AVERAGE, MASTER
from trainer.learners.engine import fill_gradients
from trainer.optimizers.config import OptimizerConfig, optimizer_config, parameter_groups
from trainer.optimizers.gated import GatedOptimizer, build_optimizer, gradient_factor
from trainer.optimizers.kinds.adamw import CautiousAdamW, StableAdamW
from trainer.optimizers.kinds.lamb import Lamb
from trainer.optimizers.shards import Shards, squared_norm, squared_norms

RATE, BETAS, EPSILON, DECAY = 0.01, (0.9, 0.999), 1e-6, 0.01


def albert_lamb(w, gradients, adaptive):
    """The weights [n] after these gradients, in float64, as in ALBERT's lamb_optimizer.py."""
    w, m, v = w.astype(np.float64), 0.0, 0.0
    for g in gradients:
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * np.square(g)
        update = m / (np.sqrt(v) + EPSILON)
        ratio = 1.0
        if adaptive:
            update += DECAY * w
            w_norm, g_norm = np.linalg.norm(w), np.linalg.norm(update)
            ratio = np.where(w_norm > 0, np.where(g_norm > 0, w_norm / g_norm, 1.0), 1.0)
        w = w - ratio * RATE * update
    return w


def test_lamb_is_its_formula():
    rng = np.random.default_rng(0)
    starts = [rng.normal(size=(5, 3)), np.zeros((4, 2)), rng.normal(size=7)]
    steps = [[rng.normal(size=w.shape) for w in starts] for _ in range(6)]
    parameters = [nn.Parameter(torch.tensor(w, dtype=torch.float32)) for w in starts]
    groups = [
        {"params": parameters[:2]},
        {"params": parameters[2:], "weight_decay": 0.0, "adaptive": False},
    ]
    lamb = Lamb(groups, RATE, BETAS, EPSILON, DECAY)
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        lamb.step()
    for number, parameter in enumerate(parameters):
        expected = albert_lamb(starts[number], [step[number] for step in steps], number < 2)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=2e-5, atol=2e-6)


def bert_adam(w, gradients, decay):
    """The weights after these gradients, in float64, as in BERT's optimization.py."""
    w, m, v = w.double(), torch.zeros(()).double(), torch.zeros(()).double()
    for g in gradients:
        m = BETAS[0] * m + (1 - BETAS[0]) * g.double()
        v = BETAS[1] * v + (1 - BETAS[1]) * g.double() ** 2
        w = w - RATE * (m / (v.sqrt() + EPSILON) + decay * w)
    return w


@pytest.mark.parametrize("bias_correction", [False, True])
def test_adam_is_berts_without_bias_correction_and_torchs_with_it(bias_correction):
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    config = optimizer_config(
        learning_rate=RATE, betas=[*BETAS], epsilon=EPSILON, weight_decay=0.1,
        bias_correction=bias_correction,
    )  # fmt: skip
    optimizer = build_optimizer(module, config, Uniform())
    theirs = [
        torch.optim.AdamW([p.detach().clone()], RATE, BETAS, EPSILON, 0.1 * (p.ndim > 1))
        for p in module.parameters()
    ]
    starts = [p.detach().clone() for p in module.parameters()]
    steps = [[torch.randn_like(w) for w in starts] for _ in range(6)]
    for gradients in steps:
        for one, parameter, gradient in zip(theirs, module.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
            one.param_groups[0]["params"][0].grad = gradient.clone()
            one.step()
        optimizer.step()
    for number, parameter in enumerate(module.parameters()):
        corrected = theirs[number].param_groups[0]["params"][0]
        plain = bert_adam(starts[number], [step[number] for step in steps], 0.1 * (not number))
        expected, other = (corrected, plain) if bias_correction else (plain, corrected)
        torch.testing.assert_close(parameter.double(), expected.double(), rtol=2e-5, atol=2e-6)
        assert not torch.allclose(parameter.double(), other.double(), rtol=1e-2, atol=1e-3)


def test_a_weight_without_gradient_keeps_its_trust_ratio_finite():
    parameter = nn.Parameter(torch.ones(2, 2))
    lamb = Lamb([parameter], RATE, weight_decay=0.0)
    parameter.grad = torch.zeros(2, 2)
    lamb.step()
    assert torch.equal(parameter, torch.ones(2, 2))


class Uniform:
    """Equal rates for all parameters."""

    def group(self, parameter: str) -> str:
        return "all"

    def factor(self, group: str, step: int) -> float:
        return 1.0


class LayerRates:
    """From step 2 on, layer 0 has three times the rate; the rest is frozen until then."""

    def group(self, parameter: str) -> str:
        return parameter.partition(".")[0]

    def factor(self, group: str, step: int) -> float:
        return 3.0 if group == "0" else float(step >= 2)


def test_groups_are_by_rate_and_by_whether_they_decay():
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    module[2].bias.requires_grad_(False)
    uniform = parameter_groups(module, optimizer_config(weight_decay=0.1), Uniform())
    assert [(len(g["params"]), g["weight_decay"], g["adaptive"]) for g in uniform] == [
        (2, 0.1, True),
        (3, 0.0, False),
    ]
    by_layer = parameter_groups(module, optimizer_config(weight_decay=0.1), LayerRates())
    assert [(g["name"], len(g["params"]), g["weight_decay"]) for g in by_layer] == [
        ("0", 1, 0.1),
        ("0", 1, 0.0),
        ("1", 2, 0.0),
        ("2", 1, 0.1),
    ]


def test_parts_in_no_decay_do_not_decay():
    module = nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    for parts, decays in ((["biases", "norms", "embeddings"], ["1.weight"]), ([], None)):
        config = optimizer_config(weight_decay=0.1, no_decay=parts)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        decayed = [
            names[id(parameter)]
            for group in parameter_groups(module, config, Uniform())
            for parameter in group["params"]
            if group["weight_decay"]
        ]
        assert sorted(decayed) == (decays or sorted(names.values()))


def test_the_vectors_of_relative_positions_are_an_embedding():
    config = EncoderConfig(hidden_size=8, layers=1, heads=2, ffn_size=8, positions="relative")
    module = nn.ModuleDict({"model": skeleton(config)})
    table = module["model"].encoder.relative.table
    for kind, settings in (("muon", {}), ("adamw", {"no_decay": ["embeddings"]})):
        groups = parameter_groups(module, optimizer_config(kind, **settings), Uniform())
        (group,) = (g for g in groups if any(parameter is table for parameter in g["params"]))
        assert group["states"] == ("exp_avg", "exp_avg_sq")
        assert (group["weight_decay"] == 0.0) == bool(settings)


def step_of(optimizer, module):
    optimizer.zero_grad()
    module(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()


KINDS = {kind: optimizer_config(kind) for kind in kinds_of(OptimizerConfig)}
KINDS["bert"] = optimizer_config(bias_correction=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_at_rate_zero_and_a_skipped_step_leave_everything_as_it_was(kind):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = build_optimizer(module, KINDS[kind], LayerRates())
    assert isinstance(optimizer, GatedOptimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * LayerRates().factor(group["name"], step=0)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    step_of(optimizer, module)
    moved = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"0.weight", "0.bias"}
    assert set(optimizer.state) == {module[0].weight, module[0].bias}

    weights = module[0].weight.detach().clone()
    first = optimizer.param_groups[0]["states"][0]
    moments = optimizer.state[module[0].weight][first].clone()
    optimizer.gradient_factor = None
    step_of(optimizer, module)
    assert torch.equal(module[0].weight, weights)
    assert torch.equal(optimizer.state[module[0].weight][first], moments)


def test_at_stage_0_a_parameter_without_gradient_is_stepped_as_at_the_others():
    """So that its step count equals that of parameters it may later share a partition with."""
    module = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 2)})
    optimizer = build_optimizer(module, optimizer_config(), Uniform())
    module["used"](torch.ones(4, 3)).sum().backward()
    fill_gradients(SimpleNamespace(module=module, optimizer=optimizer))
    optimizer.step()
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}
    assert len(optimizer.state) == 4


@pytest.mark.parametrize(("clipping", "scale"), [(0.5, 1.0), (0.5, 64.0), (100.0, 1.0), (0.0, 8.0)])
def test_gradients_are_unscaled_and_clipped_as_torch_does_it(clipping, scale):
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))
    theirs.grad = torch.randn(5)
    ours.grad = theirs.grad * scale
    norm = torch.nn.utils.clip_grad_norm_(theirs, clipping or math.inf).item()
    optimizer = GatedOptimizer(torch.optim.SGD([ours], lr=1.0))
    optimizer.gradient_factor = gradient_factor(norm, clipping, scale)
    optimizer.step()
    torch.testing.assert_close(-ours.data, theirs.grad)


KINDS_OF_TORCH = [torch.optim.Adam, torch.optim.NAdam, torch.optim.Rprop]


@pytest.mark.parametrize("kind", KINDS_OF_TORCH)  # states begin at 0, at 1, at the learning rate
@pytest.mark.parametrize("factor", [1.0, None])
def test_moments_are_forgotten_at_the_next_step_even_if_it_is_skipped(factor, kind):
    """Not before: a checkpoint is copied until the optimizer's step."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = GatedOptimizer(kind([parameter], lr=1.0))
    parameter.grad = torch.ones(3)
    optimizer.step()
    old = dict(optimizer.state[parameter])
    optimizer.state[parameter]["number"] = 7  # as a plugin may keep one
    optimizer.forget()
    assert optimizer.state[parameter] == {**old, "number": 7}
    again = nn.Parameter(parameter.detach().clone())
    again.grad, anew = torch.ones(3), kind([again], lr=1.0)
    optimizer.gradient_factor = factor
    optimizer.step()
    if factor is None:
        assert not optimizer.state[parameter]
        optimizer.gradient_factor = 1.0
        optimizer.step()
    anew.step()
    torch.testing.assert_close(optimizer.state[parameter], anew.state[again], rtol=0, atol=0)
    assert torch.equal(parameter, again)


def test_a_norm_is_as_precise_on_a_cpu_as_on_a_gpu():
    """torch adds up in float32, one element after the other: 0.2% off for BERT's embedding."""
    large = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    exact = large.double().square().sum().item()
    assert squared_norm([large, torch.empty(0)], large.device).item() == pytest.approx(exact, 1e-5)
    assert squared_norm([], large.device).item() == 0
    each = squared_norms([torch.ones(3), large, torch.ones(2)])
    assert each.tolist() == pytest.approx([3, exact, 2], 1e-5)


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(KINDS, 2)])
def test_another_optimizer_can_go_on_from_ones_state(first, second):
    """A run may switch its kind of optimizer, with the same moments or with fresh ones."""
    module = nn.Linear(3, 2)
    one = build_optimizer(module, KINDS[first], Uniform())
    step_of(one, module)
    other = build_optimizer(module, KINDS[second], Uniform())
    kept, states = (each.param_groups[0]["states"] for each in (one, other))
    for parameter, state in one.state.items():
        scalars, tensors = (
            {"step": {}},
            dict.fromkeys([MASTER, *state.keys() - {"step"}], "float32"),
        )
        stored = TensorRecord([*parameter.shape], 0, scalars, tensors, [])
        read = resumed_states(stored, states)
        names = read.states.keys() - {MASTER} | read.scalars.keys()
        other.state[parameter] = {name: state[name] for name in names}
    step_of(other, module)
    assert other.state[module.weight]["step"] == (2 if kept == states else 1)
    assert {"step", *states} == other.state[module.weight].keys()


@pytest.mark.parametrize("names", [None, ("exp_avg",), ("momentum",)])
def test_a_mean_of_the_weights_is_read_by_a_learner_that_has_one(names):
    stored = TensorRecord([2], 0, {}, dict.fromkeys([MASTER, "exp_avg", AVERAGE], "float32"), [])
    with_it, without = (resumed_states(stored, names, has_it).states for has_it in (True, False))
    assert with_it.keys() - without.keys() == {AVERAGE}
    assert with_it.keys() - {AVERAGE, MASTER} == (set() if names == ("momentum",) else {"exp_avg"})
    assert MASTER in without


def test_the_mean_of_weights_that_are_frozen_later_moves_on_towards_them():
    module = nn.Linear(3, 2)
    optimizer = build_optimizer(module, optimizer_config(), Uniform())
    optimizer.mean_kept, weights, means = 0.5, [], []
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (step < 2)
        step_of(optimizer, module)
        weights.append(module.weight.detach().clone())
        means.append(optimizer.state[module.weight][AVERAGE].clone())
    assert torch.equal(weights[3], weights[1])
    torch.testing.assert_close(means[3], weights[1] + (means[1] - weights[1]) / 4)


def adamax(w, gradients):
    """The weights after these gradients, as in MT-DNN's optim.py, in float64."""
    w, m, largest = w.double(), torch.zeros(w.shape).double(), torch.zeros(w.shape).double()
    for step, gradient in enumerate(gradients, 1):
        g = gradient.double()
        w = w * (1 - RATE * DECAY)
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        largest = torch.maximum(BETAS[1] * largest, g.abs() + EPSILON)
        w = w - RATE / (1 - BETAS[0] ** step) * m / largest
    return w


def adadelta(w, gradients):
    """The weights after these gradients, by algorithm 1 of arXiv 1212.5701, in float64."""
    w, squares, deltas = w.double(), torch.zeros(w.shape).double(), torch.zeros(w.shape).double()
    for gradient in gradients:
        g = gradient.double()
        w = w * (1 - RATE * DECAY)
        squares = BETAS[1] * squares + (1 - BETAS[1]) * g**2
        delta = ((deltas + EPSILON) / (squares + EPSILON)).sqrt() * g
        deltas = BETAS[1] * deltas + (1 - BETAS[1]) * delta**2
        w = w - RATE * delta
    return w


def debiased(gradients):
    """Adam's moments after each of these gradients, corrected for their bias, in float64."""
    m = v = torch.zeros(gradients[0].shape).double()
    for step, g in enumerate(gradients, 1):
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g**2
        yield g, m / (1 - BETAS[0] ** step), v / (1 - BETAS[1] ** step)


def stableadamw(w, gradients):
    """The weights after these gradients, by algorithm 2 of arXiv 2304.13013, in float64."""
    w = w.double()
    for g, m, v in debiased([gradient.double() for gradient in gradients]):
        rms = (g**2 / v.clamp(min=EPSILON**2)).mean().sqrt()
        rate = RATE / max(1.0, rms.item())
        w = w - rate * DECAY * w - rate * m / (v.sqrt() + EPSILON)
    return w


def cautious_adamw(w, gradients):
    """The weights after these gradients, as in the code of arXiv 2411.16085, in float64."""
    w = w.double()
    for g, m, v in debiased([gradient.double() for gradient in gradients]):
        mask = (m * g > 0).double()
        mask = mask / mask.mean().clamp(min=1e-3)
        w = w * (1 - RATE * DECAY) - RATE * m * mask / (v.sqrt() + EPSILON)
    return w


@pytest.mark.parametrize("formula", [adamax, adadelta, stableadamw, cautious_adamw])
def test_an_optimizer_is_its_formula_with_decoupled_decay(formula):
    module = nn.Linear(5, 4, bias=False)
    start = module.weight.detach().clone()
    gradients = [torch.randn(4, 5, generator=torch.Generator().manual_seed(n)) for n in range(4)]
    gradients[2] *= 30  # which StableAdamW clips
    settings = optimizer_config(
        kind=formula.__name__, learning_rate=RATE, betas=list(BETAS), epsilon=EPSILON,
        weight_decay=DECAY,
    )  # fmt: skip
    optimizer = build_optimizer(module, settings, Uniform())
    for gradient in gradients:
        module.weight.grad = gradient
        optimizer.step()
    expected = formula(start, gradients).float()
    torch.testing.assert_close(module.weight.detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"betas": [0.9, 1.0]}, "betas"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"no_decay": ["layers"]}, "no_decay"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings, key):
    with pytest.raises(ValueError, match=rf"^{key}(\[\d\])?: "):
        optimizer_config(**settings)


@pytest.mark.parametrize("kind", [Lamb, StableAdamW, CautiousAdamW])
def test_an_update_of_a_flat_tensor_is_that_of_its_parts(kind):
    """As ZeRO keeps parameters, with padding at the end, which stays as it is."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(size, generator=generator) for size in (6, 1, 0, 9)]
    flat = nn.Parameter(torch.cat([*parts, torch.full((3,), 7.0)]))
    pieces, at = [], 0
    for number, part in enumerate(parts):
        pieces.append(Piece(f"{number}", part.shape, 0, flat, at, 0, part.numel(), True))
        at += part.numel()
    apart = [nn.Parameter(part) for part in parts]
    one, other = (kind(each, RATE, BETAS, EPSILON) for each in ([flat], apart))
    one.shards = Shards({flat: pieces}, flat.device)
    for _ in range(3):
        flat.grad = torch.randn(flat.shape, generator=generator)
        for parameter, piece in zip(apart, pieces, strict=True):
            parameter.grad = piece.of(flat.grad).clone()
        one.step()
        other.step()
    torch.testing.assert_close(flat[:at], torch.cat(apart))
    assert (flat[at:] == 7.0).all()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 and later have it")
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_muon_is_torchs_on_the_matrices_of_layers_and_adamw_on_the_rest(scale):
    torch.manual_seed(0)
    layers = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))})
    module = nn.ModuleDict({"model": layers, "head": nn.Linear(6, 5)})
    config = optimizer_config(
        "muon", learning_rate=RATE, weight_decay=0.1, scale=scale, adamw_learning_rate=RATE / 4
    )
    optimizer = build_optimizer(module, config, Uniform())
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in module.named_parameters()}
    hidden = [p for name, p in copies.items() if "encoder" in name and p.ndim == 2]
    vectors = [p for p in copies.values() if p.ndim == 1]
    theirs = [
        torch.optim.Muon(hidden, RATE, weight_decay=0.1, adjust_lr_fn=scale),
        torch.optim.AdamW([copies["head.weight"]], RATE / 4, weight_decay=0.1),
        torch.optim.AdamW(vectors, RATE / 4, weight_decay=0.0),
    ]
    for _ in range(4):
        for name, parameter in module.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            copies[name].grad = parameter.grad.clone()
        for one in (optimizer, *theirs):
            one.step()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.data, copies[name].data, rtol=1e-5, atol=1e-6)
