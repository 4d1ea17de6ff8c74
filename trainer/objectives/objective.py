"""An objective: its terms by name, what they read from learner and teacher, and their sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from configs.kinds import require_returned
from data_pipeline import DEFAULT_VIEW
from model import Capture, ModelShape
from trainer.denominators import InView, Totals, require_denominator
from trainer.learner_names import MEAN, TEACHER
from trainer.objectives.objective_config import ObjectiveConfig, model_read_by
from trainer.objectives.shared_spans import SharedSpans, at_shared_spans
from trainer.objectives.stages import Stages
from trainer.objectives.task import TaskTerm, WholeBatchTerm
from trainer.objectives.term import LossInputs, Term

Targets = Collection[str] | None  # of a batch, by name; None: whatever they are
TERMS = "objective.terms."  # prefix of the terms' parameters in a learner's module


class Objective(nn.Module):
    """The terms and their learnable parts (projections), which train with the learner.

    What the terms read and weigh may change with the learner's own step, which starts at 0. When
    the teacher grows, `set_teacher_layers` changes the layer maps; the learnable parts stay.

    The objective also implements its learner's `trainer.optimizers.Rates`, from its stages. While a
    term is off, its learnable parts neither learn nor decay. The same holds for the head of a task
    at the steps of other tasks.
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        learner: ModelShape,
        teacher: ModelShape,
        seed: int,
        stages: Stages | None = None,
        others: Mapping[str, ModelShape] | None = None,
        *,
        read_by: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        """`teacher` is the teacher at its final size; `stages` say when its terms are on.

        `others` are further teachers, by name. `read_by` has the prefixes of the parameters that
        only some of several heads read, and these heads. Raises ValueError, naming the term, when
        one does not fit these models.
        """
        super().__init__()
        teachers = {TEACHER: teacher, **(others or {})}
        self.stages = stages or Stages()
        for key, why in config.misfits(learner, teachers, self.stages.follows_each_layer()):
            raise ValueError(f"{key}: {why}")
        # Returns the lead of the job's own teacher; None: not compared with it.
        self.lead: Callable[[], float] | None = None
        self.view = DEFAULT_VIEW  # in which its learner's terms are counted
        self.shared: Mapping[str, SharedSpans] = {}  # by the sources that have other tokenizers
        self.read_by = read_by or {}
        # The terms by name, in their proper type, and as modules.
        self.by_name = _build(config, learner, teachers, self.stages)
        self.terms = nn.ModuleDict(self.by_name)
        terms = self.by_name.values()
        # The names of the learners whose outputs any term reads.
        self.sources = {term.source for term in terms if term.source is not None}
        # The names of the terms that read no learner's outputs, only labels.
        self.label_terms = [name for name, term in self.by_name.items() if term.learns_labels]
        self.tasks = dict.fromkeys(term.head for term in terms if isinstance(term, TaskTerm))
        self._initialise(learner.initializer_range, seed)

    def task_among(self, targets: Collection[str]) -> str:
        """The task, among several, of a batch with these targets; empty if there is one task."""
        if len(self.tasks) < 2:
            return ""
        return next((head for head in self.tasks if head in targets), "")

    def set_teacher_layers(self, teacher_layers: int) -> None:
        """Learn from a teacher with this many layers, at the same relative depths as before.

        Only layer maps change, so this may be called at any time, also on resuming.
        """
        for term in self.by_name.values():
            if term.source == TEACHER:
                term.set_teacher_layers(teacher_layers)

    def weights(self, step: int) -> dict[str, float]:
        """The weight of each term at the learner's `step`, at the teacher's present `lead`.

        It is 0 up to a lead of the term's `min_lead`, and complete from twice that lead on.
        """
        weights = {}
        for name, term in self.by_name.items():
            weights[name] = term.weight.at(step)
            if self.lead is not None and term.min_lead is not None:
                weights[name] *= min(max(self.lead() / term.min_lead - 1.0, 0.0), 1.0)
        return weights

    def group(self, parameter: str) -> str:
        for part in self.read_by:
            if parameter.startswith(part):
                return part
        prefix, _, rest = parameter.partition(TERMS)
        term = rest.partition(".")[0]
        if not prefix and term in self._passing():
            return TERMS + term
        return self.stages.group(parameter)

    def factor(self, group: str, step: int, targets: Targets = None) -> float:
        readers = self.read_by.get(group)
        if readers is not None and targets is not None and readers.isdisjoint(targets):
            return 0.0
        is_a_term = group.startswith(TERMS)
        if is_a_term and group.removeprefix(TERMS) not in self._on(step):
            return 0.0
        if is_a_term:
            layer = self.stages.at(step)[0].layer
            return 1.0 if layer is None else self.stages.factor(str(layer), step)
        return self.stages.factor(group if readers is None else self.stages.group(group), step)

    def student_capture(self, step: int, targets: Targets = None) -> Capture:
        """The outputs that the learner's own forward returns for its terms at its `step`.

        `targets` are those of the batch, about which a term may ask for nothing; None: any batch.
        """
        on = self._on(step, targets).values()
        return union([term.student_capture(step) for term in on])

    @property
    def denominators(self) -> set[InView]:
        """The denominators that the terms use, each with the view in which it is counted."""
        return {(term.view, term.denominator) for term in self.by_name.values()}

    def set_views(self, view: str, shared: Mapping[str, SharedSpans]) -> None:
        """Count terms in the learner's `view`, or in that of the spans `shared` with their source.

        `shared` has the sources of other tokenizers, by name.
        """
        self.view, self.shared = view, shared
        for term in self.by_name.values():
            spans = shared.get(term.source or "")
            term.view = view if spans is None else spans.view

    def source_capture(self, step: int) -> Capture:
        """The outputs that the forward of the job's own teacher returns for the terms."""
        return union([term.source_capture(step) for term in self.reading(TEACHER, step)])

    def over_whole_batch(self, step: int, targets: Targets = None) -> list[WholeBatchTerm]:
        """The terms over the whole global batch that are on at the learner's `step`."""
        on = self._on(step, targets).values()
        return [term for term in on if isinstance(term, WholeBatchTerm)]

    def reading(self, source: str, step: int, targets: Targets = None) -> list[Term]:
        """The terms that read this source at the learner's `step`, for such a batch."""
        return [term for term in self._on(step, targets).values() if term.source == source]

    def total(self, terms: Mapping[str, float], step: int) -> float:
        """The loss at the learner's `step`, from the global value of every term.

        It is summed in float64, for the record and the guard. `forward` returns the share of one
        micro-batch.
        """
        return sum([weight * terms[name] for name, weight in self.weights(step).items()])

    def forward(self, inputs: LossInputs, totals: Totals) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the global loss, and of each unweighted term.

        Summed over micro-batches and ranks, the shares give the global values. Returns a scalar in
        the graph and a detached float32 vector [terms], 0 for terms that are off at this step.
        """
        if not self.terms:  # a frozen teacher's
            return torch.zeros(()), torch.zeros(0)
        losses: list[Tensor] = []
        shares: dict[str, Tensor] = {}
        weights, by_view = self.weights(inputs.step), {self.view: inputs}
        for (view, denominator, _), group in self._groups(inputs).items():
            if view not in by_view:
                by_view[view] = self._at_shared_spans(inputs, view)
            terms, scales = [*group.values()], [weights[name] for name in group]
            total, sums = terms[0].compute(terms, scales, by_view[view])
            divisor = totals[view, denominator]
            losses.append(total / divisor)
            for name, value in zip(group, sums, strict=True):
                shares[name] = value / divisor
        loss = torch.stack(losses).sum()
        of_all = [shares[name] if name in shares else loss.new_zeros(()) for name in self.terms]
        return loss, torch.stack(of_all).detach()

    def _groups(self, inputs: LossInputs) -> dict[tuple[str, str, str], dict[str, Term]]:
        """The terms that are on and have their source, by name; those of a group together.

        The key of a group begins with its view and its denominator.
        """
        groups: dict[tuple[str, str, str], dict[str, Term]] = {}
        for name, term in self._on(inputs.step, inputs.batch.targets).items():
            if term.source is None or term.source in inputs.sources:
                key = term.view, term.denominator, term.group or name
                groups.setdefault(key, {})[name] = term
        return groups

    def _at_shared_spans(self, inputs: LossInputs, view: str) -> LossInputs:
        sources = {name: shared for name, shared in self.shared.items() if shared.view == view}
        return at_shared_spans(inputs, inputs.views[view], sources)

    def _on(self, step: int, targets: Targets = None) -> dict[str, Term]:
        """The terms about a batch whose weight is not 0 at a step; all of them if there is none.

        A stage turns on only the terms that compare what it `compares`.
        """
        weights, (stage, _) = self.weights(step), self.stages.at(step)
        terms = {
            name: term
            for name, term in self.by_name.items()
            if term.compares in stage.compares and (targets is None or term.concerns(targets))
        }
        return {name: term for name, term in terms.items() if weights[name]} or terms

    def _passing(self) -> set[str]:
        """The terms that are off at some steps."""
        if len(self.stages) > 1:
            return set(self.terms)
        return {
            name
            for name, term in self.by_name.items()
            if 0.0 in term.weight.values or term.min_lead is not None
        }

    def _initialise(self, standard_deviation: float, seed: int) -> None:
        """Normal weights and zero biases, a pure function of the seed."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0.0, standard_deviation, generator=generator)
                else:
                    parameter.zero_()


def union(captures: Iterable[Capture]) -> Capture:
    """A capture of everything that any of `captures` asks for; layers and names ascending."""
    requests = [vars(capture) for capture in captures]
    asked: dict[str, Any] = {}
    for name, default in vars(Capture()).items():
        values = [request[name] for request in requests]
        is_flag = isinstance(default, bool)
        asked[name] = any(values) if is_flag else tuple(sorted({*chain(*values)}))
    return Capture(**asked)


def _build(
    config: ObjectiveConfig, learner: ModelShape, teachers: Mapping[str, ModelShape], stages: Stages
) -> dict[str, Term]:
    terms, sections = {}, config.terms()
    heads = [section.head for section in sections.values() if section.head]
    for name, section in sections.items():
        term: Term = require_returned(
            section.build(learner, model_read_by(section, teachers)),
            Term,  # type: ignore[type-abstract]
            f"{type(section).__name__}.build",
        )
        terms[name] = term
        require_denominator(term, heads)
        term.stand_beside(sections)
        term.follow(stages)
    return terms


@dataclass(frozen=True)
class Demand:
    """The demand of all students' terms on one teacher.

    is_read: whether any term reads it, alone or in the mean of several; is_mean_read: whether any
    reads the mean; capture: what its features must hold; own_logits, mean_logits: how many students
    compare with its distributions, and with the mean's.
    """

    is_read: bool
    is_mean_read: bool
    capture: Capture
    own_logits: int
    mean_logits: int

    @classmethod
    def of(
        cls,
        teacher: str,
        heads: Collection[str],
        students: Iterable[tuple[Objective, int]],
        targets: Targets = None,
        discriminators: int = 0,
    ) -> Demand:
        """The students' demand on this teacher, by the objective and own step of each student.

        `heads` are the teacher's task heads; only for these it is part of a mean. `targets` are the
        targets of the batch; None: any. `discriminators` is the number of students that read
        samples of its predictions.
        """
        captures, mean_captures = [], []
        own_logits, mean_logits = discriminators, 0
        for objective, step in students:
            direct = objective.reading(teacher, step, targets)
            of_mean = objective.reading(MEAN, step, targets)
            captures += [term.source_capture(step) for term in direct]
            mean_captures += [term.source_capture(step) for term in of_mean]
            own_logits += any(term.reads_logits for term in direct)
            mean_logits += any(term.reads_logits for term in of_mean)
        mean = union(mean_captures)
        mean = dataclasses.replace(mean, heads=tuple(sorted({*mean.heads} & {*heads})))
        return cls(
            is_read=bool(captures or mean.heads or own_logits or mean_logits),
            is_mean_read=bool(mean_captures),
            capture=union([*captures, mean]),
            own_logits=own_logits,
            mean_logits=mean_logits,
        )
