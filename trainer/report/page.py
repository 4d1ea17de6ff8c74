"""``report.html``: one file, no network, light and dark, phone and desktop."""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from configs.durable import atomic_write
from configs.progress import counted, duration, seconds_left
from trainer.batch_config import BatchConfig
from trainer.learner_names import is_teacher
from trainer.report.curves import curves_section
from trainer.report.elements import document, short
from trainer.report.results import breakdowns_section, results_section, setbacks_section
from trainer.report.savings import savings_section
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
    atomic_write(path, page)
    return path


def render(run: RunFiles, live: bool = False) -> str:
    """The page as text."""
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' if live else ""
    script = (HERE / "script.js").read_text(encoding="utf-8")
    above = (setbacks_section, results_section, breakdowns_section, savings_section)
    sections = (*above, curves_section, _data, _config)
    body = "".join([_head(run, live), *(section(run) for section in sections)])
    return document(run.name, body, head=refresh, script=script)


def _head(run: RunFiles, live: bool) -> str:
    done, steps = int(run.last["step"]), run.config["steps"]
    state = "finished" if run.evaluation and not live else f"step {done:,} of {steps:,}"
    if live:
        state += f"{_time_left(run)}, at {time.strftime('%H:%M')}"
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(more)}</dd></div>"
        for name, value, more in _facts(run)
    )
    return (
        f'<header><h1>{escape(run.name)}</h1> <span class="state">{state}</span>'
        f'<p>{_summary(run)}</p></header><dl class="facts">{facts}</dl>'
    )


def _summary(run: RunFiles) -> str:
    """A sentence about what was trained, and from what."""
    students = counted(sum(not is_teacher(name) for name in run.learners), "student")
    tasks = len(run.example_files)
    on_tasks = f" on {'a task' if tasks == 1 else f'{tasks} tasks'}" if tasks else ""
    if run.config["teacher"].get("stored"):
        return f"{students}, distilled{on_tasks} from the stored predictions of a finished teacher."
    if run.config["teacher"].get("frozen"):
        return f"{students}, distilled{on_tasks} from a finished teacher."
    if run.config["students"]:
        how = f"fine-tuned{on_tasks}" if tasks else "trained"
        return f"A teacher and {students}, {how} in one job from the same teacher forward passes."
    return f"A teacher, {f'fine-tuned{on_tasks}' if tasks else 'pre-trained'}."


def _time_left(run: RunFiles) -> str:
    """The time left at the average speed of the run so far, as text."""
    step, seconds = int(run.last["step"]), run.last["seconds"]
    if not step or not seconds:
        return ""
    left = seconds_left(step, run.config["steps"], seconds / step, seconds, run.config.get("hours"))
    return f", {duration(left)} left" if left else ""


def _facts(run: RunFiles) -> list[tuple[str, str, str]]:
    """Facts about the run as a whole: (name, value, note)."""
    last, is_text = run.last, not run.example_files
    facts = [("Steps", f"{int(last['step']):,}", f"of {_batches(run)} {_rows(run)}")]
    passes = "by the teacher"
    if run.evaluation:
        corpus = run.evaluation["corpus"]
        name, units = ("Text", "documents") if is_text else ("Examples", "examples")
        held_out = f"{short(corpus['validation_tokens'])} tokens held out"
        documents = f"{short(corpus['documents'])} {units}, and {held_out}"
        facts.insert(0, (name, f"{short(corpus['tokens'])} tokens", documents))
        passes = f"{_passes(run, corpus):.1f} times the {name.lower()}"
    facts.append(("Tokens read", short(last["tokens"]), passes))
    if last["seconds"]:
        speed = f"{short(last['tokens'] / last['seconds'])} tokens/s, all included"
        facts.append(("Time", duration(last["seconds"]), speed))
    if run.evaluation and "machine" in run.evaluation:
        name, _, more = run.evaluation["machine"].partition(", ")
        facts.append(("Machine", name, more))
    return facts


def _passes(run: RunFiles, corpus: Mapping[str, Any]) -> float:
    """How often the text was read, by tokens, or the examples, whose batch has one size.

    The tokens that are read include special ones: two or more in each short example.
    """
    if not run.example_files:
        return float(run.last["tokens"] / corpus["tokens"])
    size = BatchConfig(run.config["batch"]["size"]).at(0).sequences or 0
    return float(run.last["step"] * size / corpus["documents"])


def _batches(run: RunFiles) -> str:
    """The sizes of the batches of all steps, such as "8", "8 to 64", "about 8,192 tokens in"."""
    batch, steps = run.config["batch"], run.config["steps"]
    first = BatchConfig(batch["size"], batch.get("tokens")).at(0)
    growth = [grown for grown in batch.get("growth") or [] if grown["step"] < steps]
    sizes = [first.sequences, *(grown["size"] for grown in growth)]
    sizes += [phase.get("batch") for phase in _phases(run)[1:]]
    tokens = [size for size in (first.tokens, *(grown["tokens"] for grown in growth)) if size]
    words = [_span([*filter(None, sizes)])] if any(sizes) else []
    words += [f"about {_span(tokens)} tokens in"] if tokens else []
    return " or ".join(words)


def _rows(run: RunFiles) -> str:
    """The noun for rows of a batch, with their length."""
    if run.example_files:
        return f"examples of {_longest(run)}"
    return f"sequences of {_span([phase['sequence_length'] for phase in _phases(run)])}"


def _longest(run: RunFiles) -> str:
    """The length of the longest examples: a task may have its own."""
    data = run.config["data"]
    tasks = (data.get("tasks") or {}).values()
    lengths = [task.get("sequence_length") or data["sequence_length"] for task in tasks]
    return f"at most {max(lengths, default=data['sequence_length']):,} tokens"


def _span(sizes: Sequence[int]) -> str:
    """The smallest and the largest of these sizes: "8", or "8 to 64"."""
    return " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))


def _phases(run: RunFiles) -> list[dict[str, Any]]:
    """The keys of ``data`` from the first step on, and in each phase that the steps reach."""
    data = run.config["data"]
    phases = [{**data, "masking": data.get("masking") or {}}]
    for phase in data.get("phases") or []:
        if phase["from_step"] < run.config["steps"]:
            masking = {**phases[-1]["masking"], **_given(phase["masking"] or {})}
            if (phase["masking"] or {}).get("rate") is not None:
                masking["final_rate"] = None
            phases.append({**phases[-1], "batch": None, **_given(phase), "masking": masking})
    return phases


def _given(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a phase that it changes: the others are null."""
    return {key: value for key, value in keys.items() if value is not None}


def _in_turn(words: Iterable[str]) -> str:
    """The words of each phase, where they change."""
    return "; then ".join(text for text, _ in itertools.groupby(words))


def _data(run: RunFiles) -> str:
    """The data, and how it becomes sequences."""
    rows = _examples(run) if run.example_files else _text(run)
    items = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>"
        for name, value in rows.items()
        if value
    )
    return f'<section><h2>Data</h2><dl class="data">{items}</dl></section>'


def _text(run: RunFiles) -> dict[str, str]:
    data = run.config["data"]
    mixture = data.get("mixture") or {}
    weights = sum(source["weight"] for source in mixture.values())
    sources = [
        f"{name}: {source['path']}, {source['weight'] / weights:.0%}"
        for name, source in mixture.items()
    ]
    return {
        "corpus": "; ".join(sources) or data.get("path", ""),
        **_sizes(run, "documents"),
        "sequences": _in_turn(map(_packed, _phases(run))),
        "masked": _in_turn(_masking(phase["masking"]) for phase in _phases(run)),
    }


def _examples(run: RunFiles) -> dict[str, str]:
    return {
        "files": "; ".join(run.example_files),
        **_sizes(run, "examples"),
        "sequences": _longest(run),
    }


def _sizes(run: RunFiles, units: str) -> dict[str, str]:
    """How much was read, once the run has its final scores."""
    if run.evaluation is None or "tokens" not in (corpus := run.evaluation["corpus"]):
        return {}
    return {
        units: f"{corpus['documents']:,}",
        "tokens": f"{corpus['tokens']:,}",
        "held out": f"{corpus['validation_tokens']:,} tokens",
    }


def _packed(data: Mapping[str, Any]) -> str:
    return f"{data['sequence_length']} tokens, {data.get('packing', '')}".rstrip(", ")


def _masking(masking: Mapping[str, Any]) -> str:
    if not masking:
        return ""
    if masking["unit"] == "next_token":
        return "nothing; the next token is predicted"
    unit = {"token": "tokens", "word": "whole words", "ngram": "n-grams of words"}[masking["unit"]]
    rates = [rate for rate in (masking["rate"], masking.get("final_rate")) if rate is not None]
    return f"{' to '.join(f'{rate:.0%}' for rate in rates)} of the {unit}"


def _config(run: RunFiles) -> str:
    return (
        "<section><details><summary>Configuration</summary>"
        f"<pre>{escape(run.config_text)}</pre></details></section>"
    )


EVERY_SECONDS = 60.0
# The process ends with its rank, even if that is killed (prctl(2): PR_SET_PDEATHSIG).
_PROGRAM = """
import ctypes, os, pathlib, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[3]):
    sys.exit()
os.nice(10)
sys.path.insert(0, sys.argv[2])
from trainer.report.page import write_report
write_report(pathlib.Path(sys.argv[1]), live=True)
"""


class LiveReport:
    """The ``report.html`` of a run in progress."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._writer: subprocess.Popen[bytes] | None = None
        self._since = float("-inf")

    def refresh(self) -> None:
        """Rewrite it, unless that was done a moment ago or is still in progress."""
        now = time.monotonic()
        busy = self._writer is not None and self._writer.poll() is None
        if busy or now - self._since < EVERY_SECONDS:
            return
        self._since = now
        code = str(Path(__file__).parents[2])
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with contextlib.suppress(OSError):  # no memory or process for it: try again next time
            self._writer = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(self._folder), code, str(os.getpid())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # an error must not spoil the display
            )

    def close(self) -> None:
        """End the writer, so that it does not overwrite the final report.

        On a busy machine its low priority may keep it from finishing for a while, and the run has
        to save and end before its time limit.
        """
        if self._writer is not None:
            self._writer.kill()
            self._writer.wait()
