"""The packings by name, and what distinguishes them; `sequences` and `pairs` have their rules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Packing:
    """The properties of a packing that the rest of the pipeline reads."""

    pair_labels: tuple[str, ...] = ()  # what labels 0 and 1 of its pairs mean; empty: no pairs
    needs_boundary: bool = False  # each sequence is split in two at the beginning of a sentence
    draws_lengths: bool = True  # some sequences may aim at a random smaller length
    version: int = 0  # of its rule: cached counts of sequences of another version are not read


_NEXT = ("next", "from another document")

PACKINGS = {
    "full_sentences": Packing(),
    "contiguous": Packing(draws_lengths=False),
    "doc_sentences": Packing(),
    "segment_pair": Packing(_NEXT, needs_boundary=True, version=2),
    "sentence_pair": Packing(_NEXT, draws_lengths=False, version=2),
    "sop": Packing(("in order", "swapped"), needs_boundary=True, version=2),
}
