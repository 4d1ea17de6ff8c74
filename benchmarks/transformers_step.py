"""Training steps of `transformers`' BERT, which benchmarks time beside those of Tandem."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from data_pipeline import Batch
from model import EncoderConfig
from trainer.learners.module import AUTOCAST


def transformers_step(
    shape: EncoderConfig, batch: Batch, device: torch.device, precision: str
) -> Callable[[], None]:
    """A step of BertForMaskedLM with SDPA; compiled on a GPU only, since a CPU needs a compiler.

    It uses its own loss, fused AdamW, and gradients clipped at norm 1, as its Trainer does by
    default; no dropout. The model is of the size of `shape`. Losses are not scaled in fp16, which
    changes no speed.
    """
    config = BertConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        intermediate_size=shape.ffn_size,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    trained = BertForMaskedLM(config).train().to(device)
    assert trained.config._attn_implementation == "sdpa"
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=True)
    run = torch.compile(trained) if device.type == "cuda" else trained
    ids, labels = (torch.from_numpy(x).to(device) for x in (batch.input_ids, batch.labels()))
    dtype = AUTOCAST[precision]

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss: Tensor = run(ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
