"""How the model runs: capture, checkpointing, compilation, autocast, dropout, kernels."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn

import model
from model import attention
from model.attention import attend, attention_kernel, attention_scores, rotary_angles, rotate

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
}  # fmt: skip
EVERYTHING = model.Capture(hidden_states=(0, 1, 2, 3), attention=(1, 2, 3))


def built(family: str, **changes: object) -> model.MaskedLanguageModel:
    return model.build(model.EncoderConfig(**{**SMALL, **FAMILIES[family], **changes}), seed=0)


def ids(rows: int = 2, length: int = 12) -> Tensor:
    return torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(0))


def loss_of(x: Tensor) -> Tensor:
    """A sum in a random direction: the gradient of a normed output's square would be zero."""
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
    for only_masked in (False, True):
        got = trained.features(
            ids(),
            masked_positions=positions,
            capture=model.Capture((0, 2), (3,)),
            only_masked=only_masked,
        )
        loss = loss_of(got.vocabulary_input) + loss_of(got.attention[3].v)
        found[only_masked] = (got.vocabulary_input, gradients(trained, loss))
    torch.testing.assert_close(found[True][0], found[False][0])
    for name, gradient in found[True][1].items():
        difference = (gradient - found[False][1][name]).norm()
        assert difference <= 1e-5 * gradient.norm().clamp_min(1e-3), name


def test_captured_tensors_are_in_the_graph_and_shaped_by_head() -> None:
    trained = built("bert")
    found = trained.features(ids(), capture=model.Capture((3,), (2,)))
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
        *[(family, "aot_eager") for family in FAMILIES],
        pytest.param("bert", "inductor", marks=pytest.mark.slow),
        pytest.param("modernbert", "inductor", marks=pytest.mark.slow),
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
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5)


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
def test_both_kernels_agree(masked: bool, local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 2, 4, 21, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 21)
    mask[1, 5:] = 0
    visible = attention.visible_keys(mask if masked else None, 21, 6 if local else 0, q.device)
    found = {}
    for kernel in ("plain", "fused"):
        monkeypatch.setattr(attention, "attention_kernel", lambda *_, kernel=kernel: kernel)
        found[kernel] = attend(q, k, v, visible, 0.0)
    torch.testing.assert_close(found["plain"], found["fused"], rtol=1e-5, atol=1e-6)


def test_the_kernel_is_chosen_by_device_dtype_and_length() -> None:
    assert attention_kernel("cuda", torch.bfloat16, 128, False) == "fused"
    assert attention_kernel("cpu", torch.bfloat16, 128, False) == "plain"
    assert attention_kernel("cpu", torch.float32, 512, True) == "fused"


def test_rotary_scores_depend_on_the_distance_only() -> None:
    angles = rotary_angles(16, 8, 10000.0, torch.device("cpu"))
    one = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    q, k = (rotate(x.expand(1, 1, 16, 8), angles) for x in one)
    scores = attention_scores(q, k)[0, 0]
    torch.testing.assert_close(scores[3, 5], scores[9, 11])


def test_a_sequence_beyond_the_positions_is_an_error_of_one_line() -> None:
    with pytest.raises(model.ModelError, match="sequence_length: 13 is more than the model's 12"):
        built("bert", max_positions=12)(ids(length=13))


def test_layers_that_share_weights_hold_them_once() -> None:
    given = built("albert", groups=2, layers=4)
    assert len(given.encoder.attention) == 2
    assert given.encoder.attention_plan == [0, 0, 1, 1]
    selected = model.select_layers(given.state_dict(), [0, 3], given.config)
    shallow = model.build(
        model.EncoderConfig(**{**SMALL, **FAMILIES["albert"], "layers": 2, "groups": 2}), 0
    )
    shallow.load_state_dict(selected)
    assert torch.equal(
        shallow.encoder.attention[1].key.weight, given.encoder.attention[1].key.weight
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads: 3 does not divide"),
        ({"activation": "tanh"}, "activation: 'tanh' is not one of"),
        ({"layers": 0}, "layers: must be at least 1"),
        ({"dropout": 1.0}, "dropout: must lie in"),
        ({"embedding_size": 8}, "embedding_projection: must be word or sum"),
        ({"groups": 2}, "groups: needs sharing"),
        ({"sharing": "all", "groups": 9}, "groups: 9 is more than the 3 layers"),
        ({"trigram": True}, "trigram: needs"),
        ({"pooler": "none", "pair_head": True}, "pair_head: needs a pooler"),
        ({"pad_token_id": 50}, "pad_token_id: 50 is outside"),
        ({"positions": "rotary", "hidden_size": 10}, "heads: rotary positions need an even"),
    ],
)  # fmt: skip
def test_configurations_that_do_not_fit_together(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.EncoderConfig(**{**SMALL, **changes})
