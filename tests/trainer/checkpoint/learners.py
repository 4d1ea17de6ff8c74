"""Small learners under DeepSpeed for checkpoint tests: a fixed model, data and training loop."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

GLOBAL_BATCH = 12
VOCABULARY = 11


class TiedModel(nn.Module):
    """Odd sizes, a tied vocabulary, a frozen parameter, buffers of both kinds."""

    def __init__(self, seed: int, hidden: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.up = nn.Linear(hidden, 13)
        self.norm = nn.LayerNorm(13)
        self.down = nn.Linear(13, hidden)
        self.scale = nn.Parameter(torch.rand(hidden) + 0.5, requires_grad=False)
        self.register_buffer("seen", torch.tensor([seed, 2, 3]))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.down(F.gelu(self.norm(self.up(self.embedding(ids)))))
        return F.linear(x * self.scale, self.embedding.weight)


@dataclass(frozen=True)
class Kind:
    """One way to run a learner under DeepSpeed."""

    stage: int = 0
    precision: str = "fp32"  # fp32, bf16, autocast
    offload: bool = False
    round_robin: bool = False
    trained: bool = True
    optimizer: str = "AdamW"

    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "round_robin_gradients": self.round_robin}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 1.0,
        }
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        if self.precision == "autocast":
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        return config


def start(kind: Kind, seed: int = 0, learning_rate: float = 1e-2, hidden: int = 7) -> Any:
    """A fresh engine with two parameter groups."""
    import deepspeed

    model = TiedModel(seed, hidden)
    if not kind.trained:
        model.requires_grad_(False)
        return deepspeed.initialize(model=model, config=kind.config())[0]
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "lr": 3 * learning_rate},
    ]
    settings = {"momentum": 0.9} if kind.optimizer == "SGD" else {}
    optimizer = getattr(torch.optim, kind.optimizer)(groups, lr=learning_rate, **settings)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=kind.config())[0]


def train(engine: Any, first: int, last: int) -> list[float]:
    """Run steps ``[first, last)`` on batches that depend only on the step; the mean losses."""
    rows = GLOBAL_BATCH // dist.get_world_size()
    mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(VOCABULARY, (GLOBAL_BATCH, 5), generator=generator)
        labels = torch.randint(VOCABULARY, (GLOBAL_BATCH, 5), generator=generator)
        logits = engine(ids[mine]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels[mine].flatten())
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def digest(state: dict[str, Tensor]) -> str:
    """A hash of every bit of a state dict."""
    whole = hashlib.sha256()
    for name in sorted(state):
        whole.update(name.encode())
        whole.update(state[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()
