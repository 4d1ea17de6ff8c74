"""Whether two scores agree about the models of studies, from their recorded results.

    python benchmarks/score_agreement.py accuracy minimal_pairs

Prints Spearman's correlation over the models of each study that has both scores, and over all of
them; draws the models beside the results, and renews the table in their page where this has marks
for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.studies import agreement, page, results
from benchmarks.study import RESULTS, load


@click.command()
@click.argument("x")
@click.argument("y")
@click.option("--results", "kept", default=RESULTS, type=Path, help="Where results are kept.")
def main(x: str, y: str, kept: Path) -> None:
    """Say whether the scores X and Y, columns of studies' tables, order models alike."""
    models = scored(kept, x, y)
    if not models:
        raise click.ClickException(f"{kept}: no study has both {x} and {y}")
    name, table = f"{x}_and_{y}", agreement.table(models)
    (kept / f"{name}.svg").write_text(agreement.drawn(models, x, y), encoding="utf-8")
    page.renew(kept, name, table)
    click.echo(table)


def scored(kept: Path, x: str, y: str) -> dict[str, list[agreement.Scored]]:
    """The models that have both scores, of each study of which results are kept."""
    studies = {
        file.stem: agreement.scored(load(file.stem), results.read(file), x, y)
        for file in sorted(kept.glob("*.jsonl"))
    }
    return {name: models for name, models in studies.items() if models}


if __name__ == "__main__":
    main()
