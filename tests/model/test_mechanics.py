"""How the model runs: capture, checkpointing, compilation, autocast, dropout, kernels."""

from __future__ import annotations

import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import model
from model import attention_kernel, precision
from model.attention_kernel import (
    BANDS,
    FUSED,
    PLAIN,
    VARLEN,
    AttentionPattern,
    attend,
    attention_pattern,
    attention_scores,
    choose_kernel,
    visible_keys,
)
from model.encoder import rotary_angles, rotate

torch.set_num_threads(1)

SMALL = {"vocab_size": 50, "hidden_size": 16, "layers": 3, "heads": 2, "ffn_size": 24}
MODERN = {
    "positions": "rotary", "norm_placement": "pre", "feed_forward": "glu", "segment_types": 0,
    "pooler": "none", "local_window": 6, "global_every": 3,
}  # fmt: skip
FAMILIES = {
    "bert": {},
    "albert": {"sharing": "all", "embedding_size": 8, "embedding_projection": "sum"},
    "mobilebert": {
        "embedding_size": 8, "embedding_projection": "word", "trigram": True, "norm": "no_norm",
        "bottleneck_size": 12, "bottleneck_attention": "shared", "feed_forwards": 2,
    },
    "modernbert": MODERN,
    "deberta": {
        "positions": "relative", "position_buckets": 8, "segment_types": 0, "pooler": "none",
    },
    "eurobert": {
        "positions": "rotary", "norm_placement": "pre", "feed_forward": "glu", "segment_types": 0,
        "pooler": "none", "norm": "rms_norm", "embedding_norm": False, "heads": 4, "kv_heads": 2,
        "qk_norm": True, "head_transform": False, "tied_decoder": False,
    },
}  # fmt: skip
EVERYTHING = model.Capture(hidden_states=(0, 1, 2, 3), attention=(1, 2, 3))


def built(family: str, **changes: object) -> model.MaskedLanguageModel:
    return model.build(model.EncoderConfig(**{**SMALL, **FAMILIES[family], **changes}), seed=0)


def ids(rows: int = 2, length: int = 12) -> Tensor:
    return torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(0))


def loss_of(x: Tensor) -> Tensor:
    """A sum in a random direction; the square of a normed output would have no gradient."""
    return (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(3))).sum()


def gradients(trained: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    trained.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in trained.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [12, 250], ids=["plain kernel", "fused kernel"])
def test_capturing_changes_no_bit(family: str, length: int) -> None:
    trained = built(family)
    torch.manual_seed(0)
    quiet = trained.features(ids(length=length))
    torch.manual_seed(0)
    captured = trained.features(ids(length=length), capture=EVERYTHING)
    assert torch.equal(quiet.vocabulary_input, captured.vocabulary_input)
    without = gradients(trained, loss_of(quiet.vocabulary_input))
    with_capture = gradients(trained, loss_of(captured.vocabulary_input))
    assert all(torch.equal(without[name], with_capture[name]) for name in without)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_last_layer_at_masked_positions_only_has_the_same_gradients(family: str) -> None:
    trained = built(family, dropout=0.0, attention_dropout=0.0)
    positions = torch.tensor([1, 5, 14, 14, 0])
    found = {}
    for whole in (False, True):
        capture = model.Capture((0, 2), (3,), values=True, last_hidden_state=whole)
        got = trained.features(ids(), masked_positions=positions, capture=capture)
        assert (got.last_hidden_state is not None) == whole
        loss = loss_of(got.vocabulary_input) + loss_of(got.attention[3].v)
        found[whole] = (got.vocabulary_input, gradients(trained, loss))
    torch.testing.assert_close(found[False][0], found[True][0])
    for name, gradient in found[False][1].items():
        difference = (gradient - found[True][1][name]).norm()
        assert difference <= 1e-5 * gradient.norm().clamp_min(1e-3), name


def test_captured_tensors_are_in_the_graph_and_shaped_by_head() -> None:
    trained = built("bert")
    found = trained.features(ids(), capture=model.Capture((3,), (2,), values=True))
    assert list(found.hidden_states) == [3]
    assert found.hidden_states[3] is found.last_hidden_state
    q, k, v = found.attention[2]
    assert q.shape == k.shape == v.shape == (2, 2, 12, 8)
    q.sum().backward()
    assert trained.encoder.attention[1].query.weight.grad is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing_changes_no_gradient(family: str) -> None:
    trained = built(family, dropout=0.1, attention_dropout=0.1)

    def step() -> dict[str, Tensor]:
        torch.manual_seed(5)
        found = trained.features(ids(), capture=EVERYTHING)
        loss = loss_of(found.vocabulary_input) + loss_of(found.attention[2].k)
        return gradients(trained, loss + loss_of(found.hidden_states[1]))

    kept = step()
    trained.encoder.checkpoint_activations = True
    again = step()
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_activation_checkpointing_keeps_one_tensor_per_layer() -> None:
    def saved(checkpoint: bool) -> int:
        trained = built("bert", layers=6)
        trained.encoder.checkpoint_activations = checkpoint
        numbers = []

        def pack(tensor: Tensor) -> Tensor:
            numbers.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trained.features(ids())
        return sum(numbers)

    assert saved(True) < 0.5 * saved(False)


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("bert", "aot_eager"),
        *(
            pytest.param(family, "aot_eager", marks=pytest.mark.slow)
            for family in FAMILIES
            if family != "bert"
        ),
        *(pytest.param(one, "inductor", marks=pytest.mark.slow) for one in ("bert", "modernbert")),
    ],
)
def test_compiled_layers_compute_the_same_without_graph_breaks(family: str, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    plain, compiled = built(family), built(family)
    torch._dynamo.reset()
    compiled.compile_layers(fullgraph=True, backend=backend)
    for given in (plain, compiled):
        given.eval()
    expected = plain.features(ids(), capture=EVERYTHING)
    got = compiled.features(ids(), capture=EVERYTHING)
    torch.testing.assert_close(got.vocabulary_input, expected.vocabulary_input)
    torch.testing.assert_close(got.hidden_states, expected.hidden_states)
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    expected_gradients = gradients(plain, loss_of(expected.vocabulary_input))
    for name, gradient in gradients(compiled, loss_of(got.vocabulary_input)).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_stays_close_to_float32(family: str) -> None:
    given = built(family, dropout=0.0, attention_dropout=0.0)
    expected = given.features(ids())
    with torch.autocast("cpu", torch.bfloat16):
        got = given.features(ids(), capture=EVERYTHING)
    assert got.attention[1].q.dtype == torch.bfloat16
    difference = (got.vocabulary_input.float() - expected.vocabulary_input).norm()
    assert difference < 0.05 * expected.vocabulary_input.norm()


def test_dropout_is_on_in_training_only_and_follows_the_global_generator() -> None:
    given = built("bert", dropout=0.3, attention_dropout=0.3)
    torch.manual_seed(1)
    first = given(ids()).logits
    assert not torch.equal(given(ids()).logits, first)
    torch.manual_seed(1)
    assert torch.equal(given(ids()).logits, first)
    given.eval()
    assert torch.equal(given(ids()).logits, given(ids()).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_of_ones_equals_no_mask_and_padding_is_not_seen(family: str) -> None:
    given = built(family).eval()
    tokens, ones = ids(), torch.ones(2, 12, dtype=torch.long)
    torch.testing.assert_close(given(tokens, None, ones).logits, given(tokens).logits)
    ones[:, 8:] = 0
    other = tokens.clone()
    other[:, 9:] = 7  # the trigram embedding sees one token further than attention does
    for kept in (tokens, other):
        torch.testing.assert_close(
            given(kept, None, ones).logits[:, :8], given(tokens, None, ones).logits[:, :8]
        )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_both_kernels_agree(masked: bool, local: bool) -> None:
    q, k, v = torch.randn(3, 2, 4, 21, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 21)
    mask[1, 5:] = 0
    visible = visible_keys(mask if masked else None, 21, 6 if local else 0, q.device)
    found = [
        attend(q, k, v, AttentionPattern.of(kernel, visible, q.dtype), 0.0)
        for kernel in (PLAIN, FUSED)
    ]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", [None, "mask", "lengths"])
@pytest.mark.parametrize(("length", "window"), [(1024, 128), (1100, 10), (2100, 256)])
def test_bands_agree_with_masked_attention(padding: str | None, length: int, window: int) -> None:
    drawn = torch.Generator().manual_seed(0)
    mask = torch.ones(2, length)
    mask[1, 300:] = 0
    given = {None: None, "mask": mask, "lengths": mask.long().sum(1)}[padding]
    operands = torch.device("cpu"), torch.float32
    bands = attention_kernel.attention_pattern(given, window, (2, length), 8, operands, 0.0)
    assert bands.kernel == BANDS
    visible = visible_keys(given, length, window, operands[0])
    results = []
    for pattern in (bands, AttentionPattern.of(FUSED, visible, torch.float32)):
        drawn.manual_seed(0)
        inputs = torch.randn(3, 2, 2, length, 8, generator=drawn, requires_grad=True)
        mixed = attend(*inputs, pattern, 0.0)
        weights = torch.randn(mixed.shape, generator=drawn) * mask[:, None, :, None]
        (gradient,) = torch.autograd.grad((mixed * weights).sum(), inputs)
        results.append((mixed, gradient))
    for banded, masked in zip(*results, strict=True):
        torch.testing.assert_close(banded, masked, rtol=1e-4, atol=1e-5)


def attend_run_by_run(
    q: Tensor, k: Tensor, v: Tensor, cuts_q: Tensor, cuts_k: Tensor, longest_q: int,
    longest_k: int, *, window_size: tuple[int, int], scale: float | None,
) -> Tensor:  # fmt: skip
    """Attention as documented for `torch.nn.attention.varlen.varlen_attn`; q, k, v [T, A, D]."""
    assert cuts_q.dtype == torch.int32
    assert scale is None
    assert longest_q == longest_k >= cuts_q.diff().max()
    mixed = torch.full_like(q, float("nan"))
    for begin, end in zip(cuts_q[:-1], cuts_k[1:], strict=True):
        run = [x[begin:end].transpose(0, 1) for x in (q, k, v)]  # [A, T', D]
        position = torch.arange(end - begin)
        distance = position[None, :] - position[:, None]
        left, right = (10**6 if side < 0 else side for side in window_size)
        near = (distance >= -left) & (distance <= right)
        fused = nn.functional.scaled_dot_product_attention
        mixed[begin:end] = fused(*run, attn_mask=near).transpose(0, 1)
    return mixed


@pytest.fixture
def _runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "_varlen_attention", lambda: attend_run_by_run)


@pytest.mark.usefixtures("_runs")
@pytest.mark.parametrize("lengths", [None, [21, 5, 0, 20]], ids=["full", "padded"])
@pytest.mark.parametrize("window", [0, 6, 100])
def test_runs_of_real_tokens_and_of_padding_equal_the_masked_kernel(
    lengths: list[int] | None, window: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(3, 4, 21, 16, generator=generator).requires_grad_()
    q, k, v = flat.unflatten(3, (2, 8)).transpose(2, 3)
    counts = None if lengths is None else torch.tensor(lengths)
    real = torch.arange(21) < (21 if counts is None else counts[:, None])
    cuts = attention_kernel.run_boundaries(counts, 4, 21, q.device)
    masked = AttentionPattern.of(PLAIN, visible_keys(counts, 21, window, q.device), q.dtype)
    runs = AttentionPattern(VARLEN, boundaries=cuts, window=window)
    found = []
    for how in (masked, runs):
        mixed = attend(q, k, v, how, 0.0).transpose(1, 2)
        assert mixed.isfinite().all()
        kept = torch.where(real.expand(4, 21)[..., None, None], mixed, 0.0)
        found.append((kept, torch.autograd.grad(loss_of(kept), flat)[0]))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [0, 128])
def test_varlen_on_a_gpu_equals_the_masked_kernel(window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(3, 4, 300, 128, generator=generator)
    flat = flat.to("cuda", torch.bfloat16).requires_grad_()
    q, k, v = flat.unflatten(3, (2, 64)).transpose(2, 3)
    lengths = torch.tensor([300, 17, 0, 299], device="cuda")
    chosen = attention_pattern(lengths, window, (4, 300), 64, (q.device, q.dtype), 0.0)
    assert chosen.kernel == VARLEN
    masked = AttentionPattern.of(PLAIN, visible_keys(lengths, 300, window, q.device), q.dtype)
    real = (torch.arange(300, device="cuda") < lengths[:, None])[..., None, None]
    found = []
    for how in (masked, chosen):
        mixed = attend(q, k, v, how, 0.0).transpose(1, 2)
        kept = torch.where(real, mixed, 0.0).float()
        (gradient,) = torch.autograd.grad(kept.square().sum(), flat)
        found.append((kept.detach(), gradient.float()))
    for masked_one, varlen_one in zip(*found, strict=True):
        assert varlen_one.isfinite().all()
        assert (varlen_one - masked_one).norm() < 2e-2 * masked_one.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_a_mask_on_a_gpu_leaves_gradients_finite(dtype: torch.dtype) -> None:
    """At a length and with scores at which cuDNN's are NaN; numbers get a gradient, too."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 64, 64, generator=generator).mul(0.1).unbind()
    q[..., 0], k[..., 0] = 8.0, -120.0
    operands = [x.to("cuda", torch.bfloat16).requires_grad_() for x in (q, k, v)]
    mask = torch.ones(1, 2, 64, 64, device="cuda", dtype=dtype)
    leaves = operands if dtype == torch.bool else [*operands, mask.requires_grad_()]
    mixed = attend(*operands, AttentionPattern(FUSED, mask), 0.0)
    for gradient in torch.autograd.grad(mixed.square().sum(), leaves):
        assert gradient.isfinite().all()


def test_the_kernel_is_chosen_by_device_operands_and_what_it_may_skip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose_kernel("cpu", torch.bfloat16, 128, 64, False, 0.0) == PLAIN
    assert choose_kernel("cpu", torch.float32, 96, 64, False, 0.0) == PLAIN
    assert choose_kernel("cpu", torch.float32, 128, 64, True, 0.0) == FUSED
    with torch.inference_mode():
        assert choose_kernel("cpu", torch.float32, 16, 64, True, 0.0) == FUSED
        assert choose_kernel("cpu", torch.bfloat16, 16, 64, True, 0.0) == PLAIN
    assert choose_kernel("cpu", torch.float32, 128, 26, True, 0.0) == PLAIN
    assert choose_kernel("cpu", torch.float32, 1024, 64, True, 0.0, window=128) == BANDS
    assert choose_kernel("cpu", torch.float32, 1024, 64, True, 0.0, window=256) == FUSED
    monkeypatch.setattr(attention_kernel, "_has_varlen", lambda: True)
    assert choose_kernel("cuda", torch.bfloat16, 128, 64, True, 0.0) == VARLEN
    assert choose_kernel("cuda", torch.bfloat16, 128, 26, True, 0.0) == VARLEN
    for other in (
        ("cuda", torch.bfloat16, 128, 64, False, 0.0),
        ("cuda", torch.float32, 128, 64, True, 0.0),
        ("cuda", torch.bfloat16, 128, 257, True, 0.0),
        ("cuda", torch.bfloat16, 128, 64, True, 0.1),
    ):
        assert choose_kernel(*other) == FUSED


@pytest.mark.parametrize(
    ("capability", "has_instructions", "is_supported", "native"),
    [
        ("AVX512", True, True, True),
        ("AVX512", False, True, False),  # supported, but slower than float32
        ("AVX2", False, False, False),
        ("SVE256", False, True, True),
    ],
)
def test_bfloat16_is_native_where_its_products_have_instructions(
    monkeypatch: pytest.MonkeyPatch,
    capability: str,
    has_instructions: bool,
    is_supported: bool,
    native: bool,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    supported = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: is_supported)
    monkeypatch.setattr(torch.ops, "mkldnn", supported)
    precision._cpu_has.cache_clear()
    try:
        assert precision.is_native(torch.device("cpu"), torch.bfloat16) == native
    finally:
        precision._cpu_has.cache_clear()
    assert precision.is_native(torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_of_real_tokens_say_the_same_as_a_mask(family: str) -> None:
    given = built(family).eval()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 7:] = 0
    asked = given.config.attention_width > 0
    by_mask, by_length = (
        given(ids(), None, one, output_attention_scores=asked) for one in (mask, mask.sum(1))
    )
    assert torch.equal(by_mask.logits, by_length.logits)
    if asked:
        assert torch.equal(by_mask.attention_scores[-1], by_length.attention_scores[-1])


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_long_texts_train_in_bfloat16_whether_or_not_a_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, family: str, is_native: bool
) -> None:
    """Texts so long that a CPU uses its fused kernel, which takes masks of some dtypes only."""
    monkeypatch.setattr(precision, "_cpu_has", lambda dtype: is_native)
    given = built(family).eval()  # without dropout
    read = ids(length=400), None, torch.tensor([400, 250])
    exact = given.features(*read).vocabulary_input
    with torch.autocast("cpu", torch.bfloat16):
        rounded = given.features(*read).vocabulary_input
    real = (torch.arange(400) < read[2][:, None]).flatten()
    torch.testing.assert_close(rounded[real].float(), exact[real], rtol=0.1, atol=0.1)
    rounded.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in given.parameters() if p.grad is not None)


def test_rotary_scores_depend_on_the_distance_only() -> None:
    angles = rotary_angles(16, 8, 10000.0, torch.device("cpu"))
    one = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    q, k = (rotate(x.expand(1, 1, 16, 8), angles) for x in one)
    scores = attention_scores(q, k)[0, 0]
    torch.testing.assert_close(scores[3, 5], scores[9, 11])


def test_a_sequence_beyond_the_positions_is_an_error_of_one_line() -> None:
    with pytest.raises(model.ModelError, match="sequence_length: 13 is more than the model's 12"):
        built("bert", max_positions=12)(ids(length=13))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads: 3 does not divide"),
        ({"activation": "tanh"}, "activation: must be one of gelu, "),
        ({"layers": 0}, "layers: must be 1 to"),
        ({"dropout": 1.0}, "dropout: must be at least 0, and below 1"),
        ({"embedding_size": 8}, "embedding_projection: must be word or sum"),
        ({"groups": 2}, "groups: needs sharing"),
        ({"sharing": "all", "groups": 9}, "groups: 9 is more than the 3 layers"),
        ({"trigram": True}, "trigram: needs"),
        ({"pooler": "none", "pair_head": True}, "pair_head: needs a pooler"),
        ({"pad_token_id": 50}, "pad_token_id: 50 is outside"),
        ({"positions": "rotary", "hidden_size": 10}, "heads: rotary positions need an even"),
        (
            {**FAMILIES["deberta"], "position_buckets": 64, "max_positions": 33},
            "position_buckets: needs max_positions of at least 34",
        ),
    ],
)  # fmt: skip
def test_configurations_that_do_not_fit_together(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.EncoderConfig(**{**SMALL, **changes})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", [1, 2])
def test_twice_the_layers_are_two_copies(family, layers):
    changes = {"global_every": 1} if family == "modernbert" else {}
    small = built(family, layers=layers, **changes)
    config, state = model.double_layers(small.state_dict(), small.config)
    grown = model.build(config, seed=1)
    grown.load_state_dict(state)
    assert config.layers == 2 * layers
    before = small.state_dict()
    for name, tensor in grown.state_dict().items():
        copy = re.sub(r"(?<=encoder\.)(\w+)\.(\d+)", lambda m: f"{m[1]}.{int(m[2]) % layers}", name)
        if copy in before:
            assert torch.equal(tensor, before[copy]), name
        else:  # a first layer has no norm of its own: its copy's is as at first
            assert (tensor == (1 if name.endswith("weight") else 0)).all(), name
    assert torch.isfinite(grown(ids()).logits).all()
