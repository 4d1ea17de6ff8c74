"""What must not change when a run goes on: whatever decides which sequence comes when."""

from __future__ import annotations

import dataclasses

from trainer.config import JobConfig
from trainer.errors import TrainingError

# Keys of `data` that say how shards are fetched, not what comes out of them.
FREE = ("cache_dir", "cache_gb", "on_bad_shard")


def refuse_other_data(before: JobConfig, now: JobConfig) -> None:
    """Raise TrainingError, naming the key, if `now` would read other batches than `before`.

    The steps done already would be followed by steps of another order: sequences would come twice
    or never, and nothing would say so.
    """
    for key, (old, new) in _compared(before, now).items():
        if old != new:
            raise TrainingError(
                f"{key}: the run in {now.runs}/{now.name} has begun with {old}; "
                f"put that back, or give the job another name"
            )


def _compared(before: JobConfig, now: JobConfig) -> dict[str, tuple[object, object]]:
    pairs: dict[str, tuple[object, object]] = {
        "seed": (before.seed, now.seed),
        "batch.size": (before.batch.size, now.batch.size),
    }
    for field in dataclasses.fields(before.data):
        if field.name not in FREE:
            old, new = getattr(before.data, field.name), getattr(now.data, field.name)
            pairs[f"data.{field.name}"] = (old, new)
    return pairs
