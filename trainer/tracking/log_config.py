"""The section `log` of a job YAML."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from configs.rules import COUNT, NOT_EMPTY, Matches, OneOf, Unit
from configs.section import Refusal, Section
from trainer.tracking import kinds as _kinds  # noqa: F401 - registers those shipped
from trainer.tracking import trackers

TAG = Matches(r"(?s:.{1,64})", "of 1 to 64 characters")


@dataclass
class LogConfig(Section):
    """How often metrics are logged, and where."""

    every: Annotated[int, COUNT, Unit("steps"), "Steps between rows of metrics."] = 10
    wandb: Annotated[
        str,
        OneOf(*trackers.MODES),
        "The mode of Weights & Biases; auto: online if there is a key, otherwise offline.",
    ] = "auto"
    project: Annotated[str, NOT_EMPTY, "The project in Weights & Biases."] = "tandem"
    entity: Annotated[str, "The user or team that owns the run there; empty: your own."] = ""
    group: Annotated[str, "The group of the run there, such as a sweep; empty: none."] = ""
    job_type: Annotated[str, "The type of the run there, such as pretrain; empty: none."] = ""
    tags: Annotated[list[Annotated[str, TAG]], "The tags of the run there."] = field(
        default_factory=list
    )
    notes: Annotated[str, "A description of the run there."] = ""
    trackers: Annotated[
        list[str],
        "Trackers in addition to Weights & Biases: tensorboard, mlflow, or trackers that "
        "`plugins` register.",
    ] = field(default_factory=list)

    def conflicts(self) -> Iterator[Refusal]:
        for number, name in enumerate(self.trackers):
            if why := trackers.why_not(name):
                yield f"trackers[{number}]", why

    @property
    def wandb_run(self) -> dict[str, Any]:
        """The arguments of ``wandb.init`` that say where a run belongs and what it is."""
        names = ("project", "entity", "group", "job_type", "tags", "notes")
        return {name: getattr(self, name) or None for name in names}
