"""Comparisons between learners of two tokenizers: at the aligned spans of the text that they read.

States are compared once for each aligned span, as means over its tokens. Predictions are compared
where a span is one masked token of both, so that both begin and end together. If both vocabularies
have this token, they are compared over the tokens that both have, as if neither had others. A loss
may also need none in common.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline import MASKED, NO_LABEL
from trainer.batches import MicroBatch, MicroRuns, MicroTarget
from trainer.denominators import ATTENDED, InView
from trainer.objectives.term import LossInputs
from trainer.teacher_outputs import TeacherOutputs


@dataclass(frozen=True)
class SharedSpans:
    """How a learner is compared with a source that has another tokenizer.

    view: the view whose positions are the aligned spans of `ours`, the learner's view, and
    `theirs`, the source's. tokens: the source's id of each of the learner's tokens, int64 [V]; -1
    where it has none.
    """

    view: str
    ours: str
    theirs: str
    tokens: Tensor

    def to(self, device: torch.device) -> SharedSpans:
        """These spans, with the ids on a device."""
        return replace(self, tokens=self.tokens.to(device))


def coverage(
    learner: str, view: str, counted: Collection[InView]
) -> dict[str, tuple[InView, InView]]:
    """Metrics of how much a learner compares across tokenizers: which count is divided by which.

    view: what the learner reads; counted: the counts that divide its terms.
    """
    shared = [key for key in counted if key[0] != view]
    predictions = {
        f"{learner}/aligned_masked": ((spans, MASKED), (view, MASKED))
        for spans, name in shared
        if name == MASKED
    }
    states = {
        f"{learner}/aligned_tokens": ((spans, view), (view, ATTENDED))
        for spans, name in shared
        if name != MASKED
    }
    return predictions | states


def at_shared_spans(
    inputs: LossInputs, spans: MicroBatch, sources: Mapping[str, SharedSpans]
) -> LossInputs:
    """The inputs of terms about these `sources`, at the aligned `spans` in place of tokens."""
    ours = next(iter(sources.values())).ours
    runs, features = spans.runs[ours], inputs.features
    targets = {**spans.targets, MASKED: _labelled(inputs.batch, spans, runs)}
    read = features.vocabulary_input
    last = features.last_hidden_state
    return replace(
        inputs,
        batch=replace(spans, targets=targets),
        features=replace(
            features,
            vocabulary_input=None if read is None else read[_flat_slots(runs, len(read))],
            all_positions=None,
            attention={},
            hidden_states={n: _means(states, runs) for n, states in features.hidden_states.items()},
            last_hidden_state=None if last is None else _means(last, runs),
        ),
        sources={
            **inputs.sources,
            **{
                name: _at_spans(inputs.sources[name], spans.runs[shared.theirs], shared.tokens)
                for name, shared in sources.items()
                if name in inputs.sources
            },
        },
    )


def _at_spans(outputs: TeacherOutputs, runs: MicroRuns, tokens: Tensor) -> TeacherOutputs:
    last = outputs.last_hidden_state
    masked = outputs.distributions.get(MASKED)
    return TeacherOutputs(
        last_hidden_state=None if last is None else _means(last, runs),
        hidden_states={n: _means(states, runs) for n, states in outputs.hidden_states.items()},
        attention={},
        heads=outputs.heads,
        distributions={}
        if masked is None
        else {MASKED: masked.take(_flat_slots(runs, masked.shape[0]))},
        tokens=tokens,
    )


def _labelled(batch: MicroBatch, spans: MicroBatch, runs: MicroRuns) -> MicroTarget:
    """The learner's own labels at the compared positions."""
    target = spans.targets[MASKED]
    labels = batch.targets[MASKED].labels
    ours = labels[_flat_slots(runs, len(labels))]
    return MicroTarget(torch.where(target.labels >= 0, ours, NO_LABEL), target.positions)


def _flat_slots(runs: MicroRuns, slots: int) -> Tensor:
    """The compared places [B * N] among the B * M `slots` of the view's target."""
    rows = len(runs.slots)
    of_row = slots // rows
    first = torch.arange(0, slots, of_row, device=runs.slots.device)[:, None]
    return (runs.slots + first).view(-1)


def _means(states: Tensor, runs: MicroRuns) -> Tensor:
    """The mean of the states [B, L, H] in each span: float32 or wider [B, S, H], 0 where none is.

    Bags take turns: a span, and the tokens up to the next one. The first span is [CLS].
    """
    rows, length, width = states.shape
    begins = torch.where(runs.sizes > 0, runs.first, length)
    begins = begins + torch.arange(0, rows * length, length, device=states.device)[:, None]
    bounds = torch.stack([begins, begins + runs.sizes], dim=-1).view(-1)  # [B * S * 2]
    flat = states.reshape(rows * length, width)
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
    every = torch.arange(rows * length, device=states.device)
    bags = F.embedding_bag(every, wide, bounds, mode="mean")
    return bags[::2].view(rows, -1, width)
