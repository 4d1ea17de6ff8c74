"""What learners learn first, across a restart with another config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.learner_names import section_of


def require_no_first_stage_again(
    before: JobConfig, now: JobConfig, state: Mapping[str, Any]
) -> None:
    """Raise TrainingError where a learner would go back into a first stage that it has left.

    More `steps` lengthen a stage that is a fraction of them. `state` is that of the checkpoint,
    which was made with the config `before`.
    """
    old, new = before.in_steps(), now.in_steps()
    for name, counters in state.get("learners", {}).items():
        is_named = name in old.learners and name in new.learners
        if not is_named or counters["finished_at"] is not None:
            continue
        made = state["step"] - counters["started_at"]
        first, will_be = (job.learners[name].stages.last_begins for job in (old, new))
        if made and first <= made < will_be:
            (key,) = new.learners[name].transfers
            raise TrainingError(
                f"{section_of(name)}.{key}: would begin again, {made} steps on, with "
                f"{will_be} in place of {first}; put it back (a fraction of more steps is "
                f"longer: set {section_of(name)}.{key}.steps={first}, and fraction to null)"
            )
