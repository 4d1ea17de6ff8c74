"""Terms about the head of a task: they concern the batches of that task alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from configs.rules import Doc
from data_pipeline import MASKED
from model import Ability, Capture, ModelConfig
from trainer.objectives.term import Term, TermConfig


@dataclass
class HeadTermConfig(TermConfig):
    """The YAML section of a term about a head that a task beside it has.

    With several tasks it stands for a term for each, which is called ``SECTION_TASK``.
    """

    needs: ClassVar[tuple[Ability, ...]] = (Ability.TASK_HEAD,)

    tasks: Annotated[
        list[str], Doc("The tasks whose heads learn; empty: each of the job's tasks.")
    ] = field(default_factory=list, kw_only=True)

    def beside(self, name: str, tasks: Collection[str]) -> Mapping[str, TermConfig]:
        chosen = self.tasks or [*tasks]
        if len(tasks) < 2 and len(chosen) < 2:
            return {name: dataclasses.replace(self, tasks=chosen)}
        return {f"{name}_{task}": dataclasses.replace(self, tasks=[task]) for task in chosen}

    def unequippable(self, model: ModelConfig) -> Iterator[str]:
        yield from super().unequippable(model)
        if self.head == MASKED:
            yield "is about the head of a task, and a translation has none; remove it"

    @property
    def head(self) -> str:
        """The name of the one head; empty where there is no task."""
        return next(iter(self.tasks), "")


class HeadTerm(Term):
    """A term that reads the outputs of one task head."""

    def __init__(self, config: TermConfig) -> None:
        super().__init__(config)
        assert config.head is not None
        self.head = config.head

    def concerns(self, targets: Collection[str]) -> bool:
        return self.head in targets

    def student_capture(self, step: int) -> Capture:
        return Capture(heads=(self.head,))
