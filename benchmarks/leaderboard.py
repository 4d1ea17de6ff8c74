"""The leaderboard of masked models by processor time: time an entry, score it, renew the page.

    python benchmarks/leaderboard.py run runs/cost.json -- tandem train demo ...
    python benchmarks/leaderboard.py score NAME MODEL --cost runs/cost.json --budget 900 \
        --wikipedia enwiki_valid.txt --books books_valid.txt --pairs pairs.jsonl

``MODEL`` is a Hugging Face folder of any architecture, with its tokenizer. It is scored by
`transformers` alone, on words and not on tokens, so that entries may differ in their tokenizers.
The entry goes into ``docs/leaderboard.jsonl``, and its row into ``docs/leaderboard.md``.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.leaderboard_scores import EntryError, scores_of
from benchmarks.studies import page
from configs.durable import atomic_write
from configs.runs import STOPPED
from trainer.job_data.encoding import digest_of
from trainer.measure import describe_machine

ENTRIES = Path(__file__).resolve().parents[1] / "docs/leaderboard.jsonl"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
BUDGETS = (900, 3600, 10800)  # core-seconds, a table each


@dataclass(frozen=True)
class Cost:
    """A training command that ended well, and the processor time of it and its children."""

    command: str
    cpu_seconds: float
    revision: str
    machine: str


@dataclass(frozen=True)
class Entry:
    """A row of a table; `held_out` is a digest of the files of which its `scores` are."""

    name: str
    budget: int
    cost: Cost
    parameters: int
    held_out: str
    scores: dict[str, float]


@click.group()
def main() -> None:
    """Time and score entries of the leaderboard."""


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("cost", type=Path)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(cost: Path, command: tuple[str, ...]) -> None:
    """Run a training COMMAND, and write its processor time into the file COST.

    After a command that stopped on request (exit code 75), run the same again: its seconds add up.
    """
    so_far = cost.with_name(f"{cost.name}.stopped")
    code = subprocess.run(command).returncode
    if code not in (0, STOPPED):
        sys.exit(code)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    head = ["git", "-C", str(ENTRIES.parent), "rev-parse", "--short", "HEAD"]
    revision = subprocess.run(head, capture_output=True, text=True).stdout.strip()
    earlier = (
        json.loads(so_far.read_text(encoding="utf-8"))["cpu_seconds"] if so_far.exists() else 0
    )
    seconds = round(earlier + usage.ru_utime + usage.ru_stime, 1)
    measured = Cost(shlex.join(command), seconds, revision, describe_machine())
    line = json.dumps(dataclasses.asdict(measured)) + "\n"
    atomic_write(so_far if code else cost, line)
    if code:
        sys.exit(code)
    so_far.unlink(missing_ok=True)


@main.command()
@click.argument("name")
@click.argument("model", type=Path)
@click.option("--cost", "cost_file", type=FILE, required=True, help="Written by `run`.")
@click.option("--budget", type=click.Choice([*map(str, BUDGETS)]), required=True,
              help="Core-seconds, which choose the table.")  # fmt: skip
@click.option("--wikipedia", type=FILE, required=True, help="Held-out articles.")
@click.option("--books", type=FILE, required=True, help="Held-out novels.")
@click.option("--pairs", type=FILE, required=True, help="Minimal pairs of held-out text.")
@click.option("--entries", type=Path, default=ENTRIES, help="Another file of entries.")
def score(
    name: str,
    model: Path,
    cost_file: Path,
    budget: str,
    wikipedia: Path,
    books: Path,
    pairs: Path,
    entries: Path,
) -> None:
    """Score the entry NAME, the folder MODEL, and renew its table."""
    cost = Cost(**json.loads(cost_file.read_text(encoding="utf-8")))
    if cost.cpu_seconds > int(budget):
        raise click.ClickException(f"{name}: took {cost.cpu_seconds} core-seconds, over {budget}")
    held_out = " ".join(digest_of(file)[:8] for file in (wikipedia, books, pairs))
    others = [known for known in read(entries) if (known.name, known.budget) != (name, int(budget))]
    if any(other.held_out != held_out for other in others):
        raise click.ClickException(f"{entries}: its entries were scored on other files")
    try:
        parameters, scores = scores_of(model, {"wikipedia": wikipedia, "books": books}, pairs)
    except EntryError as error:
        raise click.ClickException(str(error)) from error
    entry = Entry(name, int(budget), cost, parameters, held_out, scores)
    lines = [json.dumps(dataclasses.asdict(each)) + "\n" for each in [*others, entry]]
    atomic_write(entries, "".join(lines))
    render(entries)


def read(file: Path) -> list[Entry]:
    """The entries of a file; none where there is no file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    fields = [json.loads(line) for line in lines]
    return [Entry(**{**known, "cost": Cost(**known["cost"])}) for known in fields]


def render(file: Path) -> None:
    """Print the tables of the entries in a file, and renew them in the pages beside it."""
    for budget in BUDGETS:
        rendered = rows([entry for entry in read(file) if entry.budget == budget])
        page.renew(file, f"board_{budget}", rendered)
        click.echo(f"{budget} core-seconds\n\n{rendered}\n")


def rows(entries: Sequence[Entry]) -> str:
    """The table of entries, the lowest loss on Wikipedia first, and the command of each."""
    if not entries:
        return "No entry yet."
    ranked = sorted(entries, key=lambda entry: entry.scores["wikipedia_loss"])
    lines = [
        "| entry | Wikipedia: loss | accuracy | books: loss | accuracy | minimal pairs "
        "| parameters | core-seconds | revision |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in ranked:
        scores = " | ".join(
            f"{value:.3f}" if "loss" in name else f"{value:.1%}"
            for name, value in entry.scores.items()
        )
        size = f"{entry.parameters / 1e6:.2f}M"
        cost = f"{entry.cost.cpu_seconds:.0f} | {entry.cost.revision}"
        lines.append(f"| {entry.name} | {scores} | {size} | {cost} |")
    commands = [
        f"- {entry.name} ({entry.cost.machine}): `{entry.cost.command}`" for entry in ranked
    ]
    return "\n".join([*lines, "", *commands])


if __name__ == "__main__":
    main()
