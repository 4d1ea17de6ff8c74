"""Which teacher layer each student layer learns from.

Layers count from 1; layer 0 is the embedding output. The strategies are those of TinyBERT
(Jiao et al., arXiv 1909.10351, section 4.4.2).
"""

from __future__ import annotations

from collections.abc import Sequence

STRATEGIES = ("uniform", "top", "bottom")


def map_layers(layers: str | Sequence[int], student_layers: int, teacher_layers: int) -> list[int]:
    """The teacher layer of student layers 1..M, for a named strategy or an explicit list.

    Raises ValueError when a uniform map does not exist or a list does not fit.
    """
    if isinstance(layers, str):
        return _named(layers, student_layers, teacher_layers)
    if len(layers) != student_layers:
        raise ValueError(f"layers lists {len(layers)} teacher layers for {student_layers} of ours")
    if not all(1 <= layer <= teacher_layers for layer in layers):
        raise ValueError(f"layers must lie between 1 and the teacher's {teacher_layers}")
    return list(layers)


def _named(strategy: str, student_layers: int, teacher_layers: int) -> list[int]:
    if strategy not in STRATEGIES:
        raise ValueError(f"layers must be a list or one of {STRATEGIES}, not {strategy}")
    if student_layers > teacher_layers:
        raise ValueError(
            f"layers: {student_layers} layers cannot map onto a teacher's {teacher_layers}"
        )
    if strategy == "top":
        return list(range(teacher_layers - student_layers + 1, teacher_layers + 1))
    if strategy == "bottom":
        return list(range(1, student_layers + 1))
    stride, rest = divmod(teacher_layers, student_layers)
    if rest:
        raise ValueError(
            f"layers: no uniform map of {student_layers} layers onto {teacher_layers}; list them"
        )
    return [stride * layer for layer in range(1, student_layers + 1)]
