"""Commands for a run's results: scores and exports."""

import sys
from pathlib import Path

import click

from commands.ending import unwound
from commands.options import MAX_DIGITS, PATH, PLUGINS, SUITE_OUT, TEXT, UNTRAINED, numbers
from commands.suites import compare, default_folder, models_and_overrides
from configs.runs import STOPPED

TIMED_TOKENS = 128  # of the text that ONNX files are timed with


@click.command()
@click.argument("names", type=PATH, nargs=-1, required=True, metavar="RUN | DIR... [KEY=VALUE]...")
@click.option("--learner", type=TEXT, help="Only this learner: teacher, or a student's name.")
@click.option("--head", type=TEXT, help="The task to score, if the model has several.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--suite", type=PATH, help="A suite: a file, or a name from configs/suite/.")
@SUITE_OUT
@click.option("--seeds", callback=numbers, help="Seeds instead of the suite's, such as 1,2,3.")
@UNTRAINED
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Processes that train each run of a suite. Default: one for each GPU, or one.",
)
@PLUGINS
def evaluate(
    names: tuple[str, ...],
    learner: str | None,
    head: str | None,
    as_json: bool,
    suite: str | None,
    out: str | None,
    seeds: list[int],
    untrained: bool,
    nproc: int | None,
) -> None:
    """Score a RUN's learners, a model in DIR, or a suite of models.

    The learners of RUN are scored on the run's held-out text or examples. The model in DIR, an
    export or an imported model, is scored on the labelled examples of its task in
    data.validation=FILE. Columns, lengths and labels are as in its training. Job keys about data,
    and teacher.objective.TASK, change them.

    With --suite, every model in DIRs is fine-tuned on every task and compared with the first model.
    Job keys change the job of every task. The same command resumes a comparison that was stopped.
    """
    from cluster.ranks import reported
    from trainer.run_folder.folder import RunFolder

    folders, overrides = models_and_overrides(names)
    is_model = suite is None and (Path(folders[0]) / "config.json").is_file()
    if suite is None and not is_model:
        RunFolder.existing(folders[0])  # a mistyped folder fits no option, and is what to say
    for option, value, fits, those in (
        ("--learner", learner, not suite and not is_model, "a RUN"),
        ("--head", head, is_model, "the folder of one model"),
        ("--out, --seeds, --untrained", out or seeds or untrained, suite, "a suite"),
        ("--nproc", nproc, suite, "a suite"),
        ("several names", folders[1:], suite, "a suite"),
        ("KEY=VALUE", overrides, suite or is_model, "the folder of a model, or a suite"),
    ):
        if value and not fits:
            raise click.UsageError(f"{option}: only for {those}")
    if suite is not None:
        to = Path(out or default_folder(suite))
        try:
            compare(suite, folders, to, overrides, seeds, untrained, nproc, as_json)
        except SystemExit as ended:
            sys.exit(reported(STOPPED) if ended.code == STOPPED else ended.code)
    elif is_model:
        _evaluate_model(folders[0], overrides, head, as_json)
    else:
        _evaluate_run(folders[0], learner, as_json)
    reported(0)


@unwound()
def _evaluate_model(folder: str, overrides: list[str], head: str | None, as_json: bool) -> None:
    from configs.strict_json import strict_json
    from trainer.device import own_device
    from trainer.evaluation.labelled_files import evaluate_model
    from trainer.report.table import model_table

    results = evaluate_model(Path(folder), overrides, own_device(), head)
    click.echo(strict_json(results) if as_json else model_table(results))


@unwound()
def _evaluate_run(run: str, learner: str | None, as_json: bool) -> None:
    from configs.strict_json import strict_json
    from trainer.evaluation.final_scores import evaluate_run
    from trainer.evaluation.finished import SavedLearners
    from trainer.report.table import student_table
    from trainer.run_folder.folder import RunFolder

    results = evaluate_run(SavedLearners(RunFolder.existing(run)), learner)
    click.echo(strict_json(results) if as_json else student_table(results))


def which_step(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> str | int | None:
    """The chosen checkpoint: best, last, or a step; `SavedLearners` refuses another word."""
    if value is None or not value.isdecimal() or len(value) > MAX_DIGITS:
        return value
    return int(value)


@click.command()
@click.argument("run", type=PATH)
@click.option(
    "--learner", type=TEXT, required=True, help="The learner: teacher, or a student's name."
)
@click.option("--out", type=PATH, required=True, help="The folder to write.")
@click.option(
    "--head",
    type=TEXT,
    help="If the model has several heads, write only this task's, for transformers.",
)
@click.option(
    "--step",
    metavar="best|last|N",
    type=TEXT,
    callback=which_step,
    help="The checkpoint: the one with the learner's best evaluation.metric on validation, the "
    "last one, or that of step N. Default: as evaluation.final says.",
)
@click.option("--average", is_flag=True, help="Write the learner's averaged weights.")
@click.option("--onnx", is_flag=True, help="Also write model.onnx, for ONNX Runtime.")
@click.option(
    "--int8",
    is_flag=True,
    help="Also write model.onnx, and model_int8.onnx with weights of 8 bits.",
)
def export(
    run: str,
    learner: str,
    out: str,
    head: str | None,
    step: str | int | None,
    average: bool,
    onnx: bool,
    int8: bool,
) -> None:
    """Write a learner of RUN in Hugging Face format."""
    from configs.progress import work
    from model import require_free

    folder = Path(out)
    require_free(folder)  # before the slow imports
    from trainer.evaluation.export import export_learner
    from trainer.evaluation.finished import SavedLearners
    from trainer.run_folder.folder import RunFolder

    saved = SavedLearners(RunFolder.existing(run), which=step)
    saved = saved.averages() if average else saved
    if onnx or int8:
        from model.onnx_export import require_onnx

        config = saved.config(saved.resolve(learner)).architecture
        require_onnx(config, folder / "model.onnx", int8=int8)
    with work(f"exporting {learner}", ticks=True):
        export_learner(saved, learner, folder, head=head)
    if onnx or int8:
        _write_onnx(folder, int8)
    at = saved.checkpoint_of(saved.resolve(learner)).step
    click.echo(f"{learner} of {run}, after {at:,} steps, is in {out}")


def _write_onnx(folder: Path, int8: bool) -> None:
    """Write the exported model as ONNX, and print the sizes and times of its files."""
    from configs.progress import work
    from model import from_pretrained
    from model.onnx_export import export_onnx, quantize_onnx, seconds_per_text

    model = from_pretrained(folder)
    files = [folder / "model.onnx", *([folder / "model_int8.onnx"] if int8 else [])]
    with work("exporting to ONNX", ticks=True):
        export_onnx(model, files[0])
        if int8:
            quantize_onnx(*files)
    tokens = min(TIMED_TOKENS, model.config.longest_sequence or TIMED_TOKENS)
    for file in files:
        size = sum(part.stat().st_size for part in folder.glob(f"{file.name}*"))
        seconds = seconds_per_text(file, tokens)
        speed = f", {1e3 * seconds:.1f} ms for {tokens} tokens on one thread" if seconds else ""
        click.echo(f"{file.name}: {size / 2**20:,.1f} MiB{speed}")
