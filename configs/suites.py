"""Suites: several tasks on which models are fine-tuned and compared."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from configs.rules import INDEX, PATH
from configs.section import Refusal, Section


@dataclass
class SuiteTaskConfig(Section):
    """One task of a suite."""

    task: Annotated[
        str, PATH, "A task: a file, or a name from configs/task/; empty: the key of this entry."
    ] = ""
    job: Annotated[
        dict[str, Any],
        "Keys of the task's job. They override the task's own keys, and the "
        "keys shared by all tasks.",
    ] = field(default_factory=dict)


@dataclass
class SuiteConfig(Section):
    """Tasks, and the seeds with which every model is fine-tuned on each of them."""

    about: Annotated[str, "What the suite measures, printed above the table."]
    tasks: Annotated[dict[str, SuiteTaskConfig], "The tasks by name."] = field(default_factory=dict)
    minimal_pairs: Annotated[
        dict[str, str],
        PATH,
        "Files or folders of minimal pairs (BLiMP's JSON lines) by name, which are scored "
        "without fine-tuning; relative names start from job.data.root.",
    ] = field(default_factory=dict)
    seeds: Annotated[list[Annotated[int, INDEX]], "Every model is fine-tuned with each."] = field(
        default_factory=lambda: [1]
    )
    job: Annotated[dict[str, Any], "Keys of the job of every task."] = field(default_factory=dict)

    def conflicts(self) -> Iterator[Refusal]:
        if not self.tasks and not self.minimal_pairs:
            yield "tasks", "a suite needs a task, or minimal_pairs"
        for name in self.tasks.keys() & self.minimal_pairs.keys():
            yield f"minimal_pairs.{name}", "is the name of a task too; choose another"
        if len(set(self.seeds)) < max(1, len(self.seeds)):
            yield "seeds", "must be one or more, each once"
