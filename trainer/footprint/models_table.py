"""A table of a job's models, made without training anything."""

from __future__ import annotations

from typing import Any

from model import describe
from trainer.config import JobConfig


def models_table(job: JobConfig) -> list[dict[str, Any]]:
    """A row for each learner, the teachers first."""
    rows = []
    for name, one in job.learners.items():
        size = describe(one.architecture, job.data.longest)
        rows.append(
            {
                "learner": name,
                "parameters": size.parameters,
                "layers": one.model.layers,
                "hidden_size": one.model.hidden_size,
                "heads": one.model.heads,
                "mflops_per_token": round(size.flops_per_token / 1e6, 3),
                "objective": ", ".join(one.objective.terms()),
                "zero_stage": one.zero_stage,
                "precision": one.precision,
            }
        )
    return rows
