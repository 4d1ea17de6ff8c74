"""Inference that leaves early: an example ends at the first layer that is certain (FastBERT)."""

from __future__ import annotations

import torch
from torch import Tensor

from model.branches import BranchedHead, uncertainty
from model.encoder import Encoder
from model.outputs import EarlyOutputs


def leave_early(
    encoder: Encoder, head: BranchedHead, x: Tensor, attention_mask: Tensor | None, speed: float
) -> EarlyOutputs:
    """Run the layers on embeddings x [B, L, H]; the mask [B, L] or [B] as in `visible_keys`.

    After each layer, the examples whose uncertainty is less than `speed` leave the batch with that
    layer's logits. Nobody leaves early at a speed of 0. The host waits for the device once a layer.
    """
    staying = torch.arange(len(x), device=x.device)
    layers = torch.full_like(staying, encoder.config.layers)
    logits: list[tuple[Tensor, Tensor]] = []  # of those who left together, and who they are
    context = encoder.context(x, attention_mask)
    for number, branch in enumerate(head, start=1):
        x = encoder.layer(number - 1, x, context)
        said = branch(x, attention_mask)
        leaves = uncertainty(said) < speed
        count = int(leaves.sum())
        if number == encoder.config.layers or count == len(staying):
            logits.append((said, staying))
            layers[staying] = number
            break
        if not count:
            continue
        logits.append((said[leaves], staying[leaves]))
        layers[staying[leaves]] = number
        stays = ~leaves
        staying, x = staying[stays], x[stays]
        attention_mask = None if attention_mask is None else attention_mask[stays]
        context = encoder.context(x, attention_mask)
    order = torch.cat([rows for _, rows in logits])
    found = torch.cat([one for one, _ in logits])
    return EarlyOutputs(torch.empty_like(found).index_copy(0, order, found), layers)
