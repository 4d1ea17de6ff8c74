"""Which teacher layer each student layer learns from.

Layers count from 1; layer 0 is the embedding output. With M student and N teacher layers:

- uniform: layer i learns from i * N / M; top: the last M; bottom: the first M (TinyBERT, Jiao et
  al., arXiv 1909.10351, section 4.4.2)
- skip and last: uniform and top without the student's last layer, which learns from predictions
  (PKD, Sun et al., arXiv 1908.09355, section 3.2): for 6 of 12, layers 2, 4 .. 10 and 7, 8 .. 11
- final: the last layer learns from the teacher's last (MiniLM, arXiv 2002.10957)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from configs.rules import OneOf

STRATEGIES = ("uniform", "top", "bottom", "skip", "last", "final")
# In YAML.
Layers = Annotated[str, OneOf(*STRATEGIES)] | list[int] | dict[int, int]


def map_layers(layers: Layers, student_layers: int, teacher_layers: int) -> dict[int, int]:
    """Student layer -> teacher layer, from a strategy, a list for all student layers, or a map.

    Raises ValueError, saying why, where a strategy does not fit or a layer does not exist.
    """
    if isinstance(layers, str):
        return _named(layers, student_layers, teacher_layers)
    mapped = _explicit(layers, student_layers)
    if not mapped or not all(
        1 <= ours <= student_layers and 1 <= theirs <= teacher_layers
        for ours, theirs in mapped.items()
    ):
        raise ValueError(
            f"layers must lie between 1 and {student_layers} (ours), {teacher_layers} (the "
            "teacher's)"
        )
    return mapped


def at_depth(layers: Mapping[int, int], final_layers: int, teacher_layers: int) -> dict[int, int]:
    """Rewrite a map onto a teacher of `final_layers` for one that so far has `teacher_layers`.

    Each teacher layer is replaced by the one at the same relative depth, rounded up: layer 10 of 12
    becomes layer 5 of 6. Layer 0 stays.
    """
    return {ours: -(-theirs * teacher_layers // final_layers) for ours, theirs in layers.items()}


def _explicit(layers: list[int] | dict[int, int], student_layers: int) -> dict[int, int]:
    if isinstance(layers, dict):
        return dict(sorted(layers.items()))
    if len(layers) != student_layers:
        raise ValueError(f"lists {len(layers)} teacher layers for {student_layers} of ours")
    return dict(enumerate(layers, start=1))


def _named(strategy: str, student_layers: int, teacher_layers: int) -> dict[int, int]:
    if strategy == "final":
        return {student_layers: teacher_layers}
    if student_layers > teacher_layers:
        raise ValueError(f"{student_layers} layers cannot map onto a teacher's {teacher_layers}")
    stride, rest = divmod(teacher_layers, student_layers)
    if rest and strategy in ("uniform", "skip"):
        raise ValueError(
            f"no {strategy} map of {student_layers} layers onto {teacher_layers}; list them"
        )
    ours = range(1, student_layers + (strategy not in ("skip", "last")))
    if not ours:
        raise ValueError(f"{strategy} leaves nothing of a single layer")
    if strategy in ("uniform", "skip"):
        return {layer: layer * stride for layer in ours}
    shift = 0 if strategy == "bottom" else teacher_layers - student_layers
    return {layer: layer + shift for layer in ours}
