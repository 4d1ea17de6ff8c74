"""What papers say of a full-size model's size and speed, and a picture of that beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.studies.svg import MARGIN, WIDTH, document, label_left_of, tick_below
from trainer.report.elements import Scale, log_ticks

ROW, LEFT, LOW, HIGH = 22, 130, 1.0, 25.0  # LOW and HIGH: the ratios at both ends
TITLE = "How many times smaller and faster than its base, as published (ring) and here (dot)"


class Ratios(NamedTuple):
    """How many times smaller and faster than another a model is."""

    smaller: float
    faster: float


@dataclass(frozen=True)
class Claim:
    """What the paper of a model says of it beside `base`, at inference or at training."""

    model: str
    base: str
    published: Ratios
    training: bool = False


CLAIMS = (
    Claim("distilbert", "bert_base", Ratios(1 / 0.6, 1.6)),  # arXiv 1910.01108: 40%, 60% faster
    Claim("tinybert_4", "bert_base", Ratios(7.5, 9.4)),  # arXiv 1909.10351, abstract
    Claim("mobilebert", "bert_base", Ratios(4.3, 5.5)),  # arXiv 2004.02984, abstract
    Claim("albert_large", "bert_large", Ratios(18, 1.7), training=True),  # arXiv 1909.11942
)


def drawn(found: Mapping[str, Ratios]) -> str:
    """The SVG: for sizes and for speeds a row for each claim, on a logarithmic scale.

    `found` is what was measured of each claim's model.
    """
    scale = Scale(math.log(LOW), math.log(HIGH))

    def x(ratio: float) -> float:
        return round(LEFT + (WIDTH - MARGIN - LEFT) * scale(math.log(ratio)), 1)

    bottom = ROW * (2 * len(CLAIMS) + 2)
    parts = [tick_below(x(tick), ROW, bottom, tick) for tick in log_ticks(LOW, HIGH)]
    legend = "ring: published, dot: here"
    parts.append(f'<text x="{WIDTH - MARGIN}" y="16" text-anchor="end">{legend}</text>')
    y = 0
    for field in Ratios._fields:
        y += ROW
        parts.append(f'<text x="{LEFT}" y="{y - 6}">times {field}</text>')
        for claim in CLAIMS:
            published, here = (
                x(getattr(one, field)) for one in (claim.published, found[claim.model])
            )
            parts += [
                label_left_of(LEFT, y + ROW // 2, claim.model),
                f'<circle class="mean" fill="none" cx="{published}" cy="{y + ROW // 2}" r="6"/>',
                f'<circle class="dot" cx="{here}" cy="{y + ROW // 2}" r="4.5"/>',
            ]
            y += ROW
    return document(TITLE, bottom + 2 * ROW, parts)
