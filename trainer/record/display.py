"""The display of a run in progress: a progress bar, or lines where there is no terminal.

    demo ━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━ 1,200/3,000 · 41,200 tokens/s · 2:31 left
      teacher: loss 4.213, accuracy 18.3%   tiny: loss 6.020, mlm 5.120, accuracy 12.0%

The accuracy, or another primary metric, is that on held-out text, unless its head is untrained.
`mlm` is shown of a learner that has other terms too: the losses of learners with different terms
cannot be compared. Nothing runs in the background: the display changes only when the trainer
updates it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from configs.progress import duration, seconds_left
from trainer.learner_names import plain_name
from trainer.run_folder.metrics import held_out, split_held_out
from trainer.scoring.columns import ACCURACY, LOSS, Column

REDRAW_SECONDS = 0.1
LINE_SECONDS = 10.0
SILENT_SECONDS = 60.0  # after so long without a logged step others are shown too
SPEED_WINDOW_SECONDS = 60.0
MASKED_WORDS = "mlm"  # the term that learners of different objectives share


class Display:
    """The live progress of one run; a context manager that leaves the last state on the screen."""

    def __init__(
        self,
        name: str,
        steps: int,
        step: int = 0,
        hours: float | None = None,
        seconds: float = 0.0,
        primary: Column = ACCURACY,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`step` of `steps` are already done; the run ends after `hours` of training at the latest.

        `seconds` is the training time so far, over all restarts.
        `primary` is the held-out score that is shown beside the loss.
        `clock` returns seconds.
        """
        self._primary = primary
        self._name, self._steps, self._step = name, steps, step
        self._hours, self._seconds = hours, seconds
        self._console, self._clock = console or Console(), clock
        self._tokens_per_second: float | None = None
        self._losses: dict[str, float | None] = {}  # None: the learner has not started
        self._masked: dict[str, float] = {}  # the part of a loss that is of the masked words
        self._scores: dict[str, float] = {}  # held-out scores by the primary metric
        self._untrained: set[str] = set()  # learners whose primary head is untrained
        self._history = deque([(clock(), step)])  # (time, steps done by then)
        self._shown_at = clock() - LINE_SECONDS
        self._is_shown = True  # there is nothing to show yet
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(self._picture(), console=self._console, auto_refresh=False)
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._show(at_once=True)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(
        self,
        step: int,
        row: Mapping[str, float],
        waiting: Iterable[str] = (),
        untrained: Iterable[str] | None = None,
    ) -> None:
        """Show the metrics row of `step`; `waiting` names learners that have not started.

        `untrained` names learners whose primary head is untrained; None: unchanged.
        """
        self._step = step
        self._seconds = row.get("seconds", self._seconds)
        self._tokens_per_second = row.get("tokens_per_second", self._tokens_per_second)
        for key, value in row.items():
            learner, _, column = key.rpartition("/")
            if parts := split_held_out(key):
                _, learner, column = parts
                score = held_out(row, learner, column)
                if column == self._primary.name and score is not None:
                    self._scores[learner] = score
            elif column == "loss":
                self._losses[learner] = value
            elif column == MASKED_WORDS:
                self._masked[learner] = value
        for learner in waiting:
            self._losses.setdefault(learner, None)
        if untrained is not None:
            self._untrained = set(untrained)
        self._note_time()
        self._is_shown = False
        self._show()

    def advance(self, step: int, seconds: float) -> None:
        """Show that `step`, which is not logged, is done, if a minute has passed in silence.

        `seconds` is the training time so far, over all restarts.
        """
        if self._clock() - self._shown_at < SILENT_SECONDS:
            return
        self._step, self._seconds, self._shown_at = step, seconds, self._clock()
        self._note_time()
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
        else:
            self.say(f"{self._name}: step {self._facts()}")

    def say(self, message: str) -> None:
        """Print one line, above the bar where there is one."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _note_time(self) -> None:
        now = self._clock()
        self._history.append((now, self._step))
        while len(self._history) > 2 and now - self._history[1][0] > SPEED_WINDOW_SECONDS:
            self._history.popleft()

    def _show(self, at_once: bool = False) -> None:
        pause = REDRAW_SECONDS if self._live else LINE_SECONDS
        now = self._clock()
        if self._is_shown or (now - self._shown_at < pause and not at_once):
            return
        self._is_shown, self._shown_at = True, now
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
        else:
            learners = [self._learners("; ")] if self._losses else []
            self.say(" · ".join([f"{self._name}: step {self._facts()}", *learners]))

    def _picture(self) -> Group:
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        bar = ProgressBar(total=self._steps, completed=self._step)
        line.add_row(Text(self._name, style="bold"), bar, Text(self._facts()))
        return Group(line, Text(f"  {self._learners('   ')}", style="dim"))

    def _facts(self) -> str:
        facts = [f"{self._step:,}/{self._steps:,}"]
        if self._tokens_per_second is not None:
            facts.append(f"{self._tokens_per_second:,.0f} tokens/s")
        left = self._seconds_left()
        if left:
            facts.append(f"{duration(left)} left")
        return " · ".join(facts)

    def _learners(self, between: str) -> str:
        return between.join(self._learner(name) for name in self._losses)

    def _learner(self, name: str) -> str:
        loss, masked, score = (of.get(name) for of in (self._losses, self._masked, self._scores))
        short = plain_name(name)
        if loss is None:
            return f"{short}: waiting"
        facts = [f"loss {loss:.3f}"]
        if masked not in (None, loss):
            facts.append(f"mlm {masked:.3f}")
        if name in self._untrained:
            facts.append("head not trained")
        elif score is not None:
            held_out = "held-out " if self._primary.name == LOSS.name else ""
            facts.append(f"{held_out}{self._primary.heading} {self._primary.written(score)}")
        return f"{short}: {', '.join(facts)}"

    def _seconds_left(self) -> float | None:
        """At the speed of the last minute; None before the first step, 0 at the end."""
        (then, first), (now, last) = self._history[0], self._history[-1]
        if last == first:
            return None
        return seconds_left(
            self._step, self._steps, (now - then) / (last - first), self._seconds, self._hours
        )
