"""``report.html``: one file, no network, light and dark, phone and desktop."""

from __future__ import annotations

import os
import time
from html import escape
from pathlib import Path
from typing import Any

from trainer.learner_names import is_teacher
from trainer.measure.durations import duration, seconds_left
from trainer.report.curves import curves_section
from trainer.report.document import document
from trainer.report.results import results_section, setbacks_section
from trainer.report.savings import savings_section
from trainer.report.words import count, short
from trainer.run_folder.run_files import RunFiles

HERE = Path(__file__).parent
REFRESH_SECONDS = 60


def write_report(run_folder: Path, live: bool = False) -> Path:
    """Write ``report.html`` from the files in `run_folder` and return its path.

    ``config.yaml`` must exist; ``metrics.jsonl`` and ``evaluation.json`` are shown if they do. The
    page of a `live` run reloads itself once a minute.
    """
    page = render(RunFiles.read(run_folder), live)
    path = run_folder / "report.html"
    beside = path.with_name("report.html.new")
    beside.write_text(page, encoding="utf-8")
    os.replace(beside, path)
    return path


def render(run: RunFiles, live: bool = False) -> str:
    """The page as text."""
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' if live else ""
    script = (HERE / "script.js").read_text(encoding="utf-8")
    sections = (setbacks_section, results_section, savings_section, curves_section, _data, _config)
    body = "".join([_head(run, live), *(section(run) for section in sections)])
    return document(run.name, body, head=refresh, script=script)


def _head(run: RunFiles, live: bool) -> str:
    students = sum(not is_teacher(name) for name in run.learners)
    done, steps = int(run.last["step"]), run.config["steps"]
    state = "finished" if run.evaluation and not live else f"step {done:,} of {steps:,}"
    if live:
        state += f"{_time_left(run)}, at {time.strftime('%H:%M')}"
    what = "A teacher, pre-trained by masked language modelling."
    if run.config["data"].get("train"):
        what = "A teacher, fine-tuned on a task."
    if students:
        what = (
            f"A teacher and {count(students, 'student')}, trained in one job "
            "from the same teacher forward passes."
        )
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(more)}</dd></div>"
        for name, value, more in _facts(run)
    )
    return (
        f'<header><h1>{escape(run.name)}</h1> <span class="state">{state}</span>'
        f'<p>{what}</p></header><dl class="facts">{facts}</dl>'
    )


def _time_left(run: RunFiles) -> str:
    """The time left at the average speed of the run so far, as text."""
    step, seconds = int(run.last["step"]), run.last["seconds"]
    if not step or not seconds:
        return ""
    left = seconds_left(step, run.config["steps"], seconds / step, seconds, run.config.get("hours"))
    return "" if left is None else f", {duration(left)} left"


def _facts(run: RunFiles) -> list[tuple[str, str, str]]:
    """Facts about the run as a whole: (name, value, note)."""
    last, config = run.last, run.config
    batch, length = config["batch"], config["data"]["sequence_length"]
    size = f"{batch['size']:,}" if batch["size"] else f"about {batch['tokens']:,} tokens in"
    shape = f"of {size} sequences of {length:,}"
    facts, passes = [("Steps", f"{int(last['step']):,}", shape)], "by the teacher"
    if run.evaluation:
        corpus = run.evaluation["corpus"]
        held_out = f"{short(corpus['validation_tokens'])} tokens held out"
        documents = f"{short(corpus['documents'])} documents, and {held_out}"
        facts.insert(0, ("Text", f"{short(corpus['tokens'])} tokens", documents))
        passes = f"{last['tokens'] / corpus['tokens']:.1f} times the text"
    facts.append(("Tokens read", short(last["tokens"]), passes))
    if last["seconds"]:
        speed = f"{short(last['tokens'] / last['seconds'])} tokens/s, all included"
        facts.append(("Time", duration(last["seconds"]), speed))
    if run.evaluation and "machine" in run.evaluation:
        name, _, more = run.evaluation["machine"].partition(", ")
        facts.append(("Machine", name, more))
    return facts


def _data(run: RunFiles) -> str:
    """The data, and how it becomes sequences."""
    data, corpus = run.config["data"], run.evaluation["corpus"] if run.evaluation else {}
    mixture = data.get("mixture") or {}
    weights = sum(one["weight"] for one in mixture.values())
    sources = [
        f"{name}: {one['path']}, {one['weight'] / weights:.0%}" for name, one in mixture.items()
    ]
    rows = {
        "corpus": "; ".join(sources) or data.get("path", ""),
        "documents": f"{corpus['documents']:,}" if "documents" in corpus else "",
        "tokens": f"{corpus['tokens']:,}" if "tokens" in corpus else "",
        "held out": f"{corpus['validation_tokens']:,} tokens" if "tokens" in corpus else "",
        "sequences": f"{data['sequence_length']} tokens, {data.get('packing', '')}".rstrip(", "),
        "masked": _masking(data.get("masking") or {}),
    }
    items = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>"
        for name, value in rows.items()
        if value
    )
    return f'<section><h2>Data</h2><dl class="data">{items}</dl></section>'


def _masking(masking: dict[str, Any]) -> str:
    if not masking:
        return ""
    unit = {"token": "tokens", "word": "whole words", "ngram": "n-grams of words"}[masking["unit"]]
    return f"{masking['rate']:.0%} of the {unit}"


def _config(run: RunFiles) -> str:
    return (
        "<section><details><summary>Configuration</summary>"
        f"<pre>{escape(run.config_text)}</pre></details></section>"
    )
