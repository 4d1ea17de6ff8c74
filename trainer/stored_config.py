"""The `stored` section of a frozen teacher: its predictions, written once and read by many jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from configs.rules import COUNT, NOT_EMPTY, PATH, Doc, OneOf, positive
from configs.section import Refusal, Section
from model import ModelShape

VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass
class StoredConfig(Section):
    """A folder with a teacher's predictions at every predicted token, in the order of the job.

    These are the masked tokens of text, and the tokens of a translation.

    `tandem store` writes it; a job with the same teacher and data reads it instead of running the
    teacher. The target is the softmax over the largest logits at the term's temperature. With all
    logits in fp32 it equals the teacher's distribution. With `samples` the target is the share of
    each token among draws from the teacher's distribution; its expectation is that distribution.
    """

    path: Annotated[str, PATH, NOT_EMPTY, Doc("The folder.")]
    top_k: Annotated[
        int | None, COUNT, Doc("How many logits of a position are stored; null: all of them.")
    ] = 8
    precision: Annotated[
        str, OneOf(*VALUE_BYTES), Doc("The precision in which the logits are stored.")
    ] = "fp16"
    samples: Annotated[
        int | None,
        COUNT,
        Doc(
            "Instead of the largest logits, this many tokens are stored, drawn from the "
            "teacher's distribution (arXiv 2503.16870). For losses that are linear in it: soft_kl, "
            "soft_cross_entropy, blended. null: the largest logits."
        ),
    ] = None
    temperature: Annotated[
        float,
        positive(1000.0),
        Doc("The temperature of the distribution from which `samples` are drawn."),
    ] = 1.0

    def conflicts(self) -> Iterator[Refusal]:
        for key in self.changed("top_k", "precision") if self.samples else ():
            yield key, "is for logits, and samples are tokens; remove it, or samples"
        if self.samples is None and [*self.changed("temperature")]:
            yield "temperature", "is for samples; remove it, or set these"

    def size(self, vocabulary: int) -> int:
        """How many logits of a position, or drawn tokens, are stored."""
        if self.samples is not None:
            return self.samples
        return vocabulary if self.top_k is None else self.top_k

    def position_bytes(self, vocabulary: int) -> int:
        """The bytes of one masked position: its logits and, unless all are stored, their tokens.

        Of drawn tokens, these alone.
        """
        k = self.size(vocabulary)
        if self.samples is not None:
            return k * id_bytes(vocabulary)
        return k * (VALUE_BYTES[self.precision] + (0 if k == vocabulary else id_bytes(vocabulary)))

    def conflicts_with_teacher(self, teacher: ModelShape, frozen: bool) -> Iterator[Refusal]:
        """A teacher that changes or has no such predictions, and more logits than it has."""
        if not frozen:
            yield "", "is for a frozen teacher; set frozen: true, or remove it"
        if not teacher.mlm_head:
            yield "", "the teacher has no masked-LM head"
        if self.samples is None and self.size(teacher.vocab_size) > teacher.vocab_size:
            yield "top_k", f"the vocabulary has {teacher.vocab_size} tokens; null stores all"


def id_bytes(vocabulary: int) -> int:
    """The bytes of the narrowest integer that can name every token."""
    return next(size for size in (1, 2, 4) if vocabulary <= 256**size)
