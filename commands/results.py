"""Commands for a run's results: scores and exports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from commands.options import PATH

if TYPE_CHECKING:
    pass


@click.command()
@click.argument("run", type=PATH)
@click.option("--learner", help="Only this learner: teacher, or a student's name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evaluate(run: str, learner: str | None, as_json: bool) -> None:
    """Score RUN's learners on held-out text."""
    from configs.strict_json import strict_json
    from trainer.evaluation.final_scores import evaluate_run
    from trainer.evaluation.finished import SavedLearners
    from trainer.report import student_table
    from trainer.run_folder.folder import RunFolder

    results = evaluate_run(SavedLearners(RunFolder.existing(run)), learner)
    click.echo(strict_json(results) if as_json else student_table(results))


@click.command()
@click.argument("run", type=PATH)
@click.option("--learner", required=True, help="teacher, or a student's name.")
@click.option("--out", type=PATH, required=True)
@click.option("--onnx", is_flag=True, help="Also write model.onnx.")
def export(run: str, learner: str, out: str, onnx: bool) -> None:
    """Write a learner of RUN in Hugging Face format."""
    from model import require_free

    folder = Path(out)
    require_free(folder)  # before the slow imports
    from trainer.evaluation.export import export_learner
    from trainer.evaluation.finished import SavedLearners
    from trainer.run_folder.folder import RunFolder

    export_learner(SavedLearners(RunFolder.existing(run)), learner, folder)
    if onnx:
        from model import from_pretrained
        from model.onnx_export import export_onnx

        export_onnx(from_pretrained(folder), folder / "model.onnx")
    click.echo(f"{learner} of {run} is in {out}")
