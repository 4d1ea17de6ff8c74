"""A trace of some steps, for chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch.profiler import ProfilerActivity, profile

from configs.rules import Doc, Matches
from configs.section import Refusal, Section

_log = logging.getLogger(__name__)


@dataclass
class ProfileConfig(Section):
    """A trace of some steps, for chrome://tracing or https://ui.perfetto.dev."""

    steps: Annotated[
        str,
        Matches(r"(\d+:\d+)?", "two steps, as in 100:103"),
        Doc("The steps to trace, A:B without B, as in `100:103`; empty: none."),
    ] = ""

    def conflicts(self) -> Iterator[Refusal]:
        if self.span and self.span[0] >= self.span[1]:
            yield "steps", f"must be two steps, as in 100:103, not {self.steps!r}"

    @property
    def span(self) -> tuple[int, int] | None:
        """The first step of the trace, and the first that is not in it."""
        if not self.steps:
            return None
        first, _, last = self.steps.partition(":")
        return int(first), int(last)


class Tracer:
    """Traces this rank's steps of the config's span into `file`."""

    def __init__(self, config: ProfileConfig, file: Path) -> None:
        self._span, self._file = config.span, file
        self._profile: Any = None

    def before(self, step: int) -> None:
        """Called before the job's `step`."""
        if self._span is None:
            return
        if self._profile is not None and step >= self._span[1]:
            self.close()
        elif self._profile is None and self._span[0] <= step < self._span[1]:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, profile_memory=True, record_shapes=True)
            self._profile.start()

    def close(self) -> None:
        """Write the trace to the file."""
        if self._profile is None:
            return
        self._profile.stop()
        self._file.parent.mkdir(exist_ok=True)
        self._profile.export_chrome_trace(str(self._file))
        _log.warning("a trace of the steps is in %s", self._file)
        self._profile = None
