"""The command that looks inside a finished model: `tandem analyze`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.job_configs import task_job
from commands.options import PATH, PLUGINS
from configs import assignment

if TYPE_CHECKING:
    from model import Model
    from trainer.analysis.analysis import Analysis
    from trainer.analysis.examples import Examples

PRUNED = "pruned"  # the folder of the pruned model, in the one of the analysis
NUMBERS, PAGE = "analysis.json", "analysis.html"


@click.command()
@click.argument("folder", type=PATH, metavar="DIR")
@click.argument("named", type=PATH, metavar="TEXT|TASK")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--examples",
    "limit",
    type=click.IntRange(min=1),
    default=256,
    help="How many sequences of TEXT, examples of TASK or sentences of --parsed to analyse.",
)
@click.option("--length", type=click.IntRange(min=4), help="Tokens in a sequence of TEXT. [128]")
@click.option(
    "--disable",
    "way",
    type=click.Choice(["zero", "uniform"]),
    help="How to disable a head: uniform attention, or an output of 0. [uniform; with"
    " --prune: zero]",
)
@click.option(
    "--parsed",
    type=PATH,
    help="Parsed sentences (CoNLL-U): also report attention to words by feature, and between "
    "pairs of words.",
)
@click.option("--prune", type=click.IntRange(min=1), help="Prune this many of the worst heads.")
@click.option("--out", type=PATH, help="The folder to write. [runs/analysis/DIR-TEXT]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@PLUGINS
def analyze(
    folder: str,
    named: str,
    overrides: tuple[str, ...],
    limit: int,
    length: int | None,
    way: str | None,
    parsed: str | None,
    prune: int | None,
    out: str | None,
    as_json: bool,
) -> None:
    """Show what attention heads attend to, and what each is worth.

    Each head is disabled in turn, and the model is scored without it. On a TEXT (a file, or - for
    standard input) the score is the loss of masked words. On a TASK on which DIR was fine-tuned (a
    YAML file, or a name from configs/task/), it is the score of the validation examples. Job keys
    change the task's job, as in data.root=/data.
    """
    _refuse_misuse(named, overrides, length, way, prune)
    source = Path(folder)
    target = Path(out or f"runs/analysis/{source.resolve().name}-{Path(named).stem}")
    from data_pipeline.shards.locking import unfinished
    from model import require_free
    from model.attention_heads import UNIFORM, ZERO
    from trainer.analysis.analysis import analyze, with_attention, with_pruned
    from trainer.analysis.linguistic import linguistic_attention, read_sentences
    from trainer.device import own_device

    _refuse_other_files(target, folder, named)
    if prune and not _has_pruned(target / NUMBERS):
        require_free(target / PRUNED)
    model = with_attention(source, own_device(), prune or 0)
    sentences = read_sentences(model, source, parsed, limit) if parsed else []
    examples = _examples(model, source, named, overrides, limit, length)
    analysis = analyze(model, source, named, examples, way or (ZERO if prune else UNIFORM))
    if parsed:
        attention = linguistic_attention(model, sentences, parsed)
        analysis = dataclasses.replace(analysis, linguistic=attention)
    target.mkdir(parents=True, exist_ok=True)
    if not prune:
        click.echo(_written(analysis, target, as_json))
        return
    with unfinished(target / PRUNED) as part:
        analysis = with_pruned(analysis, model, examples, prune, part, target / PRUNED)
        # The numbers first: by these a repeated command knows a pruned model that it may replace.
        text = _written(analysis, target, as_json)
        _replace_model(part, target / PRUNED)
    click.echo(text)


def _refuse_misuse(
    named: str, overrides: tuple[str, ...], length: int | None, way: str | None, prune: int | None
) -> None:
    """Raise UsageError for options that do not go together."""
    if _is_task(named) and length is not None:
        raise click.UsageError("--length: is for a TEXT; for a TASK set data.sequence_length=...")
    if overrides and not _is_task(named):
        raise click.UsageError(f"{overrides[0]}: job keys are for a TASK, which {named} is not")
    if prune and way == "uniform":
        raise click.UsageError("--prune: removes heads, so it needs --disable zero")


def _examples(
    model: Model,
    folder: Path,
    named: str,
    overrides: tuple[str, ...],
    limit: int,
    length: int | None,
) -> Examples:
    """The sequences or examples on which the model in `folder` is analysed."""
    from trainer.analysis.examples import TaskExamples, TextExamples

    if not _is_task(named):
        return TextExamples(model, folder, named, length, limit)
    words = (assignment("teacher.init.pretrained", folder), *overrides)
    job = task_job(named, words)
    longest = model.config.longest_sequence
    if longest and longest < job.data.sequence_length:  # of the task; a user's is refused
        job = task_job(named, (assignment("data.sequence_length", longest), *words))
    return TaskExamples(model, folder, job, limit)


def _refuse_other_files(target: Path, folder: str, named: str) -> None:
    """Raise DataError if `target` has files of these names that this analysis does not renew."""
    from data_pipeline.errors import DataError
    from data_pipeline.shards.writing import refuse_existing

    earlier = _analysis_in(target / NUMBERS)
    if earlier is None:
        refuse_existing([target / NUMBERS, target / PAGE])
    elif [earlier["model"], earlier["examples"]] != [str(Path(folder)), named]:
        subject = f"{earlier['model']} on {earlier['examples']}"
        raise DataError(f"{target / NUMBERS}: is the analysis of {subject}; name another --out")


def _analysis_in(path: Path) -> dict[str, Any] | None:
    from configs.strict_json import parse_json

    try:
        tree = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    is_analysis = (
        isinstance(tree, dict) and {"model", "examples", "scored", "patterns"} <= tree.keys()
    )
    return tree if is_analysis else None


def _has_pruned(path: Path) -> bool:
    """Whether an analysis names a pruned model, which this command then wrote or was to write."""
    earlier = _analysis_in(path)
    return earlier is not None and earlier.get("pruned") is not None


def _replace_model(part: Path, folder: Path) -> None:
    """Move the files of a model into a folder; until all are there it has no weights."""
    folder.mkdir(exist_ok=True)
    weights = "model.safetensors"
    (folder / weights).unlink(missing_ok=True)
    for name in sorted((path.name for path in part.iterdir()), key=lambda name: name == weights):
        (part / name).replace(folder / name)


def _written(analysis: Analysis, target: Path, as_json: bool) -> str:
    """Write the JSON and the page of an analysis to `target`; returns the text to print."""
    from configs.durable import atomic_write
    from configs.strict_json import strict_json
    from data_pipeline.text.text_files import without_surrogates
    from trainer.analysis.analysis import to_json
    from trainer.analysis.page import analysis_table, render

    text, page = strict_json(to_json(analysis)), target / PAGE
    atomic_write(target / NUMBERS, f"{text}\n")
    atomic_write(page, without_surrogates(render(analysis)))
    # A file's name may hold bytes that are no UTF-8.
    return text if as_json else without_surrogates(f"{analysis_table(analysis)}\n\nPage: {page}")


def _is_task(named: str) -> bool:
    """Whether a name is a YAML file, or the name of a shipped task and of no file."""
    import configs

    if named.endswith((".yaml", ".yml")):
        return True
    return configs.is_shipped(named, "task") and not Path(named).exists()
