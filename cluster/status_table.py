"""The table of `tandem status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.status import RunStatus
from configs.progress import duration

COLOURS = {
    "running": "green",
    "finished": "green",
    "stalled": "yellow",
    "failed": "red",
    "unreadable": "red",
}


def table(runs: Sequence[RunStatus]) -> RenderableType:
    """One row per run, and below the table a line for everything that needs attention."""
    grid = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    # On a narrow terminal, names are folded, steps and ages wrapped; other numbers stay whole.
    grid.add_column("run", overflow="fold", min_width=8)
    grid.add_column("state", no_wrap=True)
    grid.add_column("step", min_width=10)
    grid.add_column("loss", no_wrap=True)
    grid.add_column("tokens/s", no_wrap=True, justify="right")
    grid.add_column("left", no_wrap=True, justify="right")
    grid.add_column("saved", min_width=10)
    grid.add_column("starts", no_wrap=True, justify="right", min_width=6)
    for run in runs:
        grid.add_row(
            Text(run.name),
            Text(run.state, style=COLOURS.get(run.state, "")),
            f"{run.step:,} of {'?' if run.steps is None else f'{run.steps:,}'}",
            Text("\n".join(_loss(run, learner) for learner in run.losses)),
            "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
            "" if run.seconds_left is None else duration(run.seconds_left),
            _checkpoint(run),
            str(run.attempts),
        )
    return Group(grid, *(Text(line) for run in runs for line in _remarks(run)))


def _loss(run: RunStatus, learner: str) -> str:
    """The loss of a learner that compares with others': of masked words, where it learns them."""
    loss, masked = run.losses[learner], run.masked_losses.get(learner)
    if masked is None:
        others = run.masked_losses.keys() - {learner}
        return f"{learner} {loss:.3f}{' (no mlm)' if others else ''}"
    return f"{learner} {masked:.3f}{' (mlm)' if masked != loss else ''}"


def _checkpoint(run: RunStatus) -> str:
    if run.checkpoint is None or run.checkpoint_age is None:
        return ""
    return f"{run.checkpoint:,}, {duration(run.checkpoint_age)} ago"


def _remarks(run: RunStatus) -> list[str]:
    remarks = []
    if run.reason:
        verb = run.state if run.state in ("failed", "finished") else f"is {run.state}"
        remarks.append(f"{run.name} {verb}: {run.reason}")
    if run.restarts:
        remarks.append(f"{run.name} was restarted: {_counted(run.restarts)}")
    remarks += [f"{run.name}: {line}" for line in (*run.slow_ranks, *run.setbacks, *run.damaged)]
    if run.alerts and run.state in ("running", "stalled", "failed"):
        remarks.append(f"{run.name} alerted: {'; '.join(run.alerts)}")
    if run.log and run.state in ("running", "stalled", "failed"):
        remarks.append(f"{run.name} logs to {run.log}")
    return remarks


def _counted(reasons: Sequence[str]) -> str:
    """The reasons, once each, with their counts: "the time limit (8 times); preempted"."""
    counts = Counter(reason or "no reason given" for reason in reasons)
    return "; ".join(
        reason if count == 1 else f"{reason} ({count} times)" for reason, count in counts.items()
    )
