"""Training steps of `transformers`' models, which benchmarks time beside those of Tandem."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM

from data_pipeline import Batch
from model import EncoderConfig
from model.hugging_face.conversion import to_transformers
from model.initialisation import skeleton
from trainer.learners.module import AUTOCAST


def transformers_step(
    shape: EncoderConfig, batch: Batch, device: torch.device, precision: str
) -> Callable[[], None]:
    """A step of the same masked LM, compiled on a GPU only, since a CPU needs a compiler.

    It uses SDPA where the class has it, its own loss, fused AdamW, and gradients clipped at norm 1,
    as its Trainer does by default; no dropout. Losses are not scaled in fp16, which changes no
    speed.
    """
    shape = shape.with_dropout(0.0)
    config, _ = to_transformers(shape, skeleton(shape).state_dict())
    known = AutoConfig.for_model(**config)
    if hasattr(known, "sparse_prediction"):
        known.sparse_prediction = True  # the output layer reads masked tokens only
    theirs = AutoModelForMaskedLM.from_config(known)
    trained = theirs.train().to(device)
    assert shape.positions == "relative" or trained.config._attn_implementation == "sdpa"
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
