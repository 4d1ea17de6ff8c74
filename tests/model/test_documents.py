"""Rows of several documents against the documents alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import configs
from model import (
    CLASSIFICATION,
    Capture,
    Documents,
    ModelConfig,
    ModelError,
    TaskHeadConfig,
    attention_kernel,
    build,
)
from model.attention_kernel import FUSED, PLAIN, RUNS

SIZES = [[5, 9, 3, 13], [30], [1, 29], [14, 2, 7]]  # the last row has 7 positions of padding
LENGTH, VOCABULARY = 30, 50
MODELS = {
    "bert": {"base": "bert_base"},
    "roberta": {"base": "roberta_base"},
    "mobilebert": {"base": "mobilebert", "bottleneck_size": 16, "embedding_size": 8},
    "modernbert": {"base": "modernbert_base", "local_window": 6, "pad_token_id": 0},
    "albert": {"base": "albert_base", "embedding_size": 8},
    "deberta": {"base": "deberta_v3_base", "position_buckets": 12},
}
SMALL = {
    "hidden_size": 32, "layers": 3, "heads": 2, "ffn_size": 48, "vocab_size": VOCABULARY,
    "max_positions": 64, "dropout": 0.0,
}  # fmt: skip


def model_of(name: str, **settings: object):
    tree = {**MODELS[name], **SMALL, **settings}
    config = configs.load_text(
        "\n".join(f"{key}: {value}" for key, value in tree.items()), ModelConfig, "model", [], name
    )
    return build(config, seed=1).eval()


def rows() -> tuple[torch.Tensor, Documents, list[tuple[int, int, int]]]:
    """Ids [B, L], their documents, and (row, first, last) of each document."""
    ids = torch.randint(5, VOCABULARY, (len(SIZES), LENGTH), generator=torch.manual_seed(0))
    numbers, places = torch.zeros_like(ids), []
    for row, sizes in enumerate(SIZES):
        begin = 0
        for number, size in enumerate(sizes, start=1):
            numbers[row, begin : begin + size] = number
            places.append((row, begin, begin + size))
            begin += size
        ids[row, begin:] = 1
    return ids, Documents.of(numbers), places


@pytest.fixture(params=[PLAIN, FUSED, RUNS])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def choose(device, dtype, length, head_size, skips, dropout, runs=False, window=0):
        return request.param if runs else FUSED

    monkeypatch.setattr(attention_kernel, "choose_kernel", choose)
    return request.param


@pytest.mark.parametrize("name", MODELS)
def test_a_document_in_a_row_is_as_alone(name: str, kernel: str) -> None:
    """Hidden states, pooled states, masked-LM loss and its gradients."""
    model = model_of(name)
    ids, documents, places = rows()
    layers = tuple(range(model.config.layers + 1))
    capture = Capture(hidden_states=layers, last_hidden_state=True)
    packed = model.features(ids, None, documents, capture=capture)
    loss, gradients = torch.zeros(()), None
    weight, bias = model.output_projection()
    for number, (row, first, last) in enumerate(places):
        alone = model.features(ids[row : row + 1, first:last], capture=capture)
        for layer in layers:
            states = packed.hidden_states[layer][row, first:last]
            torch.testing.assert_close(states, alone.hidden_states[layer][0])
        if packed.pooled is not None:
            torch.testing.assert_close(packed.pooled[number], alone.pooled[0])
        logits = F.linear(alone.vocabulary_input, weight, bias)
        loss = loss + F.cross_entropy(logits, ids[row, first:last], reduction="sum")
    loss.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    model.zero_grad()
    weight, bias = model.output_projection()
    at = torch.cat([torch.arange(first, last) + row * LENGTH for row, first, last in places])
    logits = F.linear(packed.vocabulary_input[at], weight, bias)
    together = F.cross_entropy(logits, ids.flatten()[at], reduction="sum")
    together.backward()
    torch.testing.assert_close(together, loss)
    for key, parameter in model.named_parameters():
        if gradients[key] is not None and not key.endswith("key.bias"):
            torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("pooling", ["pooler", "first", "mean"])
def test_heads_pool_within_documents(pooling: str) -> None:
    head = TaskHeadConfig(CLASSIFICATION, ["no", "yes"], pooling=pooling)
    model = model_of("bert")
    model = build(model.config.with_task_head("mood", head), seed=1).eval()
    ids, documents, places = rows()
    capture = Capture(last_hidden_state=True, heads=("mood",))
    packed = model.features(ids, None, documents, capture=capture).heads["mood"]
    for number, (row, first, last) in enumerate(places):
        alone = model.features(ids[row : row + 1, first:last], capture=capture).heads["mood"]
        torch.testing.assert_close(packed[number], alone[0])


def test_attention_scores_are_of_the_document_alone() -> None:
    model = model_of("modernbert")
    ids, documents, places = rows()
    packed = model(ids, None, documents, output_attention_scores=True).attention_scores
    row, first, last = places[3]
    alone = model(ids[row : row + 1, first:last], output_attention_scores=True).attention_scores
    for together, by_itself in zip(packed, alone, strict=True):
        torch.testing.assert_close(together[row, :, first:last, first:last], by_itself[0])
        lowest = torch.finfo(together.dtype).min
        assert (together[row, :, first:last, :first] == lowest).all()


def test_the_number_of_runs_takes_few_values() -> None:
    shapes = set()
    for documents in range(1, 40):
        numbers = torch.arange(40).clamp(max=documents - 1)[None]
        made = Documents.of(numbers)
        assert made.sizes == (*[1] * (documents - 1), 41 - documents)
        assert int(made.boundaries[-1]) == 40
        shapes.add(made.boundaries.shape)
    assert len(shapes) == 7


def test_a_long_row_is_attended_to_document_by_document() -> None:
    numbers = torch.zeros(1, 256, dtype=torch.int64)
    numbers[:, 100:] = 1
    operands = torch.device("cpu"), torch.float32
    chosen = [
        attention_kernel.attention_pattern(mask, 0, (1, 256), 64, operands, 0.0).kernel
        for mask in (Documents.of(numbers), None)
    ]
    assert chosen == [RUNS, FUSED]


def test_a_model_that_cannot_tell_documents_apart_says_so() -> None:
    ids, documents, _ = rows()
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "layers": 1}
    lines = [f"{key}: {value}" for key, value in sizes.items()]
    text = "\n".join(["kind: bilstm", *lines])
    model = build(configs.load_text(text, ModelConfig, "model", [], "bilstm"), seed=1)
    with pytest.raises(ModelError, match="attention_mask: a model of kind bilstm cannot tell"):
        model.features(ids, None, documents)
