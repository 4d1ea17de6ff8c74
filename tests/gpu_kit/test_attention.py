"""The GPU's attention with kernels for the CPU: their inputs, and their results."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from model import Capture, Documents, Padded, attention_kernel
from model.attention_kernel import (
    FUSED,
    VARLEN,
    AttentionPattern,
    attend,
    attention_pattern,
    visible_keys,
)
from model.precision import kernels_of
from tests.distributed import run_distributed
from tests.model.test_documents import model_of
from trainer.footprint.work import Work
from trainer.objectives.terms import attention as relations

CPU = torch.device("cpu")
LENGTHS, LENGTH = torch.tensor([16, 3, 9, 1, 15]), 16


def qkv(head_size):
    generator = torch.Generator().manual_seed(0)
    shape = (3, len(LENGTHS), 4, LENGTH, head_size)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def varlen_queries(window=0, is_causal=False):
    """The shapes of the queries that torch's own operator sees from now on, in a CPU kernel."""
    from torch.nn.attention import varlen

    shapes = []

    @varlen._varlen_attn.register_kernel("cpu")
    def _(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *args, **kwargs):
        call = dict(zip(("is_causal", "scale", "window_size"), args, strict=False)) | kwargs
        assert cu_seq_q.dtype == torch.int32
        assert max_q == max_k == LENGTH
        assert call.get("is_causal", False) == (is_causal and not window)
        shapes.append(tuple(query.shape))
        mixed = torch.zeros_like(query)
        for begin, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
            run = [x[begin:end].transpose(0, 1).float() for x in (query, key, value)]
            left, right = call["window_size"]
            assert right == (0 if is_causal else left)
            near = visible_keys(None, end - begin, 0 if left < 0 else 2 * left, CPU)
            near = torch.ones(1, end - begin, end - begin) if near is None else near[0]
            near = (near.tril() if is_causal else near).bool()
            fused = F.scaled_dot_product_attention(*run, attn_mask=near, scale=call["scale"])
            mixed[begin:end] = fused.transpose(0, 1)
        return mixed, torch.zeros(query.shape[1], query.shape[0]), torch.zeros(2)

    return shapes


def takes_varlen():
    return mock.patch.object(attention_kernel, "_has_varlen", return_value=True)


def varlen_on_the_cpu(window, head_size, is_causal=False):
    """The head sizes of torch's operator, and the largest error."""
    shapes = varlen_queries(window, is_causal)
    operands = (CPU, torch.bfloat16)
    q, k, v = qkv(head_size)
    real = torch.arange(LENGTH) < LENGTHS[:, None]
    mask = Documents.of(real.long(), is_causal=True) if is_causal else LENGTHS
    with kernels_of("cuda"), takes_varlen():
        pattern = attention_pattern(mask, window, q[:, 0].shape[:2], head_size, operands, 0.0)
        assert pattern.kernel == VARLEN
        found = attend(q, k, v, pattern, 0.0)
    seen = visible_keys(mask, LENGTH, window, CPU)
    wanted = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=seen)
    assert found.isfinite().all()
    return [shape[-1] for shape in shapes], float(
        ((found.float() - wanted) * real[:, None, :, None]).abs().max()
    )


@pytest.mark.parametrize(
    ("window", "head_size", "is_causal"),
    [(0, 16, False), (6, 16, False), (0, 26, False), (0, 16, True), (6, 16, True)],
)
def test_torchs_varlen_operator_gets_what_it_takes(window, head_size, is_causal):
    sizes, error = run_distributed(varlen_on_the_cpu, 1, window, head_size, is_causal)[0]
    assert sizes == [head_size + -head_size % 8]
    assert error < 0.02  # a bfloat16's


def layers_on_tokens(name):
    """Queries of torch's operator; states, queries, keys and values on tokens, and on all rows."""
    shapes, model = varlen_queries(), model_of(name)
    ids = torch.randint(5, 50, (len(LENGTHS), LENGTH), generator=torch.manual_seed(0))
    layers = tuple(range(1, model.config.layers + 1))
    captured = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for mask in (Padded(LENGTHS, int(LENGTHS.sum())), LENGTHS):
            with kernels_of("cuda"), takes_varlen():
                capture = Capture(layers, layers, values=True)
                features = model.features(ids, None, mask, capture=capture)
            captured.append([*features.hidden_states.values()])
            qkv = [x.transpose(1, 2) for layer in features.attention.values() for x in layer]
            captured[-1] += qkv
    real = torch.arange(LENGTH) < LENGTHS[:, None]
    return shapes, [[x[real].float() for x in states] for states in captured]


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_varlen_reads_real_tokens_where_layers_compute_no_others(name):
    shapes, (on_tokens, on_rows) = run_distributed(layers_on_tokens, 1, name)[0]
    tokens = [shape[0] for shape in shapes]
    assert tokens == [int(LENGTHS.sum())] * 3 + [LENGTHS.numel() * LENGTH] * 3
    for mine, expected in zip(on_tokens, on_rows, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0.02, atol=0.02)


def test_heads_that_no_fused_kernel_takes_are_padded():
    """TinyBERT's head size of 26: with a mask, a GPU has only the math kernel for it."""
    q, k, v = qkv(26).float()
    pattern = AttentionPattern(FUSED, visible_keys(LENGTHS, LENGTH, 0, CPU))
    plain, sizes = F.scaled_dot_product_attention, []

    def fused(*operands, **settings):
        sizes.extend(x.shape[-1] for x in operands)
        return plain(*operands, **settings)

    with mock.patch.object(F, "scaled_dot_product_attention", fused):
        on_cpu = attend(q, k, v, pattern, 0.0)
        with kernels_of("cuda"):
            on_gpu = attend(q, k, v, pattern, 0.0)
    assert sizes == [26] * 3 + [32] * 3
    torch.testing.assert_close(on_cpu, on_gpu)


def test_attention_losses_launch_few_kernels_on_a_gpu():
    """Scores of 12 heads at 32 x 512 are one block there, and 32 on a CPU."""
    counted = {}
    for device in ("cpu", "cuda"):
        with FakeTensorMode(), kernels_of(device):
            student, teacher = (
                tuple(torch.empty(32, 12, 512, size).requires_grad_() for _ in range(2))
                for size in (26, 64)
            )
            mask = torch.ones(32, 512, dtype=torch.bool)
            with Work() as live:
                relations.attention_mse(student, teacher, mask)[0].backward()
            counted[device] = live.kernels
    assert counted["cuda"] < 60 < 600 < counted["cpu"]


def backends(visible):
    """Whether flash, memory-efficient, plain and cuDNN's kernels may serve a GPU's attention."""
    flags, plain = [], F.scaled_dot_product_attention

    def noted(*operands, **settings):
        names = ("flash", "mem_efficient", "math", "cudnn")
        flags.extend(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in names)
        return plain(*operands, **settings)

    with mock.patch.object(F, "scaled_dot_product_attention", noted), kernels_of("cuda"):
        attend(*qkv(16).float(), AttentionPattern(FUSED, visible), 0.0)
    return flags


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_cudnn_never_gets_a_mask(dtype):
    """Its gradients may be NaN then, and a mask of numbers, as DeBERTa's, would get none."""
    mask = visible_keys(LENGTHS, LENGTH, 0, CPU)
    assert backends(mask.to(dtype)) == [True, True, True, False]
    assert backends(None) == [True] * 4


def compiled_with_a_mask():
    mask, (q, k, v) = visible_keys(LENGTHS, LENGTH, 0, CPU), qkv(16).float()
    run = torch.compile(attend, backend="eager", fullgraph=True)
    pattern = AttentionPattern(FUSED, mask)
    with kernels_of("cuda"):
        return run(q, k, v, pattern, 0.0).equal(attend(q, k, v, pattern, 0.0))


def test_attention_with_a_mask_stays_in_a_layers_graph():
    assert run_distributed(compiled_with_a_mask, 1) == [True]


def compiled_varlen():
    """Whether it equals what is not compiled; compiling must not warn."""
    varlen_queries()
    q, k, v = qkv(16)
    with kernels_of("cuda"), takes_varlen(), warnings.catch_warnings():
        warnings.simplefilter("error")
        operands = CPU, torch.bfloat16
        pattern = attention_pattern(LENGTHS, 0, q[:, 0].shape[:2], 16, operands, 0.0)
        run = torch.compile(attend, backend="eager", fullgraph=True)
        return pattern.kernel == VARLEN and run(q, k, v, pattern, 0.0).equal(
            attend(q, k, v, pattern, 0.0)
        )


def test_varlen_stays_in_a_layers_graph_without_a_warning():
    assert run_distributed(compiled_varlen, 1) == [True]
