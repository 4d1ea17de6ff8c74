"""The part of the report about training: every curve of every learner."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from trainer.learner_names import BACKWARD, FORWARD, STEP, plain_name
from trainer.report.chart import Axis, Level, LineChart, Mark, Series, line_chart
from trainer.report.elements import Floats, colour, percent, short
from trainer.run_folder.run_files import RunFiles
from trainer.scoring.columns import SHARE

KNOWN = {"loss", "accuracy", "pair_accuracy"}  # held-out scores with charts of their own
NOT_TERMS = ("loss", "lr", "grad_norm", "skipped_steps", "overflows", "loss_scale", "lead")
MOST_STROKES = 100  # with more checkpoints than this, none is marked


def curves_section(run: RunFiles) -> str:
    """All charts, with a choice of x axis."""
    if not run.rows:
        return "<section><p>Nothing has been logged yet.</p></section>"
    axes = _axes(run)
    choices = "".join(
        f'<label><input type="radio" name="axis" id="by-{axis.unit}"'
        f"{' checked' if axis is axes[0] else ''}>{axis.unit}</label>"
        for axis in axes
    )
    main = [line_chart(chart, axes) for chart in _main_charts(run) if chart.has_lines]
    more = [line_chart(chart, axes) for chart in _more_charts(run) if chart.has_lines]
    return (
        f'<section class="curves"><h2>Curves</h2><fieldset>{choices}</fieldset>'
        f'<div class="grid">{"".join(main)}</div>'
        "<details><summary>Objectives, learning rates, gradients, memory</summary>"
        f'<div class="grid">{"".join(more)}</div></details></section>'
    )


def _axes(run: RunFiles) -> list[Axis]:
    axes = [Axis("steps", lambda steps: steps)]
    for unit, column, divisor in (("tokens", "tokens", 1), ("minutes", "seconds", 60)):
        steps, values = run.clock(column)
        if values[-1] > 3 * 3600 and unit == "minutes":
            unit, divisor = "hours", 3600
        if values[-1] > 0:
            axes.append(_interpolated(unit, steps, values / divisor))
    return axes


def _interpolated(unit: str, known: Floats, values: Floats) -> Axis:
    return Axis(unit, lambda steps: np.interp(steps, known, values))


def _main_charts(run: RunFiles) -> Iterator[LineChart]:
    marks = [Mark(f"{plain_name(name)} joins", step) for name, step in sorted(run.joined().items())]
    yield from _task_charts(run, marks)  # a task's score is what its run is about
    yield LineChart(
        f"{_of_tokens(run)} loss in training",
        f"Nats per {_token(run)}, for every learner that is trained on it",
        _series(run, "mlm"),
        _nats,
        _unigram(run, "loss"),
        marks,
    )
    others = [name for name in run.learners if f"{name}/mlm" not in run.last]
    yield LineChart(
        "Loss in training",
        f"The weighted sum of its terms, for every learner that is not trained on {_token(run)}s",
        _named(run, {name: run.curve(f"{name}/loss") for name in others}),
        _nats,
        marks=marks,
    )
    yield from _held_out_charts(run, marks)
    steps, speed = run.curve("tokens_per_second")
    yield LineChart(
        "Speed",
        "Tokens per second of the whole job; strokes at the bottom are checkpoints",
        [Series("job", 0, steps, speed)] if len(steps) else [],
        short,
        marks=[*marks, *_interruptions(run)],
        from_zero=True,
    )


def _held_out_charts(run: RunFiles, marks: Sequence[Mark]) -> Iterator[LineChart]:
    yield LineChart(
        f"{_of_tokens(run)} loss on held-out text",
        f"Nats per {_token(run)}",
        _held_out(run, "loss"),
        _nats,
        _unigram(run, "loss"),
        marks,
    )
    yield LineChart(
        "Accuracy on held-out text",
        f"Share of {_token(run)}s predicted right",
        _held_out(run, "accuracy"),
        percent,
        _unigram(run, "accuracy"),
        marks,
        from_zero=True,
        shares=True,
    )
    yield LineChart(
        "Accuracy of pairs on held-out text",
        "Share of pairs of segments whose order or succession is predicted right",
        _held_out(run, "pair_accuracy"),
        percent,
        marks=marks,
        shares=True,
    )


def _of_tokens(run: RunFiles) -> str:
    return "Masked-LM" if run.masks_tokens else "Next-token"


def _token(run: RunFiles) -> str:
    return "masked token" if run.masks_tokens else "next token"


def _task_charts(run: RunFiles, marks: Sequence[Mark]) -> Iterator[LineChart]:
    """The scores of tasks' heads, the primary one first, and further ones of text."""
    held_out = "the validation examples" if run.example_files else "held-out text"
    for column in run.scores_in_charts():
        if column.name not in KNOWN:
            yield LineChart(
                f"{column.heading} on {held_out}",
                "At every evaluation",
                _held_out(run, column.name),
                column.written,
                marks=marks,
                shares=column.form == SHARE,
            )


def _unigram(run: RunFiles, column: str) -> list[Level]:
    """The unigram baseline's score as a level, once the run has its final scores."""
    scores = run.evaluation["unigram"] if run.evaluation else {}
    return [Level("unigram", scores[column])] if column in scores else []


def _interruptions(run: RunFiles) -> Iterator[Mark]:
    """Numbered restarts, and checkpoints unless there are too many to tell apart."""
    yield from (Mark(f"restart {number}", step) for number, step in run.restarts())
    checkpoints = run.checkpoints()
    if len(checkpoints) <= MOST_STROKES:
        yield from (Mark("", step) for step in checkpoints)


def _more_charts(run: RunFiles) -> Iterator[LineChart]:
    for learner in run.learners:
        terms = [column for column in run.columns_of(learner) if is_term(column)]
        if len(terms) > 1:
            columns = ["loss", *terms]
            yield LineChart(
                f"Objective of {plain_name(learner)}",
                "Its loss (the weighted sum) and its terms",
                [
                    Series(name, i, *run.curve(f"{learner}/{name}"))
                    for i, name in enumerate(columns)
                ],
                short,
                from_zero=True,
            )
    yield _time(run)
    yield _each_learner(run, "Learning rate", "By each learner's own schedule", "lr")
    yield _each_learner(run, "Gradient norm", "Before clipping", "grad_norm")
    steps, memory = run.curve("memory")
    if len(steps):
        yield LineChart(
            "Memory",
            "Largest so far, in GB",
            [Series("process", 0, steps, memory / 1e9)],
            short,
            from_zero=True,
        )


def is_term(column: str) -> bool:
    """Whether a column of a learner is a part of its objective."""
    return column not in NOT_TERMS and not column.startswith(("seconds_", "bytes_", "aligned_"))


def _time(run: RunFiles) -> LineChart:
    """A chart of the time that a learner's step takes: both passes and the update."""
    curves = {}
    for name in run.learners:
        keys = [f"{name}/seconds_{part}" for part in (FORWARD, BACKWARD, STEP)]
        # A teacher that has used up its budget has only a forward pass.
        times = [(row["step"], [row[key] for key in keys if key in row]) for row in run.rows]
        points = np.array([(step, 1e3 * sum(parts)) for step, parts in times if parts])
        curves[name] = points.reshape(-1, 2)[:, 0], points.reshape(-1, 2)[:, 1]
    title, note = "Time of each learner", "Milliseconds per step on rank 0, with communication"
    return LineChart(title, note, _named(run, curves), short, from_zero=True)


def _each_learner(run: RunFiles, title: str, note: str, column: str) -> LineChart:
    return LineChart(title, note, _series(run, column), short, from_zero=True)


def _series(run: RunFiles, column: str) -> list[Series]:
    """The column of every learner that has it."""
    return _named(run, {name: run.curve(f"{name}/{column}") for name in run.learners})


def _held_out(run: RunFiles, column: str) -> list[Series]:
    """A held-out score of every learner, the mean over the corpora."""
    return _named(run, {name: run.held_out(name, column) for name in run.learners})


def _named(run: RunFiles, curves: Mapping[str, tuple[Floats, Floats]]) -> list[Series]:
    return [
        Series(plain_name(name), colour(run, name), steps, values)
        for name, (steps, values) in curves.items()
        if len(steps)
    ]


def _nats(loss: float) -> str:
    return f"{loss:.3g}" if loss >= 100 else f"{loss:.2f}"
