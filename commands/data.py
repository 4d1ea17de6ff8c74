"""Commands for corpora."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commands.errors import FAILED
from commands.job_configs import data_section, task_job
from commands.options import ENCODING, FIELD, FRACTION, PATH, POSITIVE, SEPARATOR, TEXT, parse_pair
from configs import assignment

if TYPE_CHECKING:
    from trainer.augmentation.augmenting import Method
    from trainer.config import JobConfig

COPIES = click.option(
    "--copies",
    type=click.IntRange(1, 1000),
    default=30,
    help="Copies of each text. Equal copies are written once.",
)
LEARNER = click.option(
    "--learner",
    type=TEXT,
    help="Read this learner's view: teacher, or a student's name. Needed if the views differ.",
)
SEED = click.option("--seed", type=click.IntRange(0), default=1, help="The random seed.")


@click.group()
def data() -> None:
    """Build, check and inspect corpora."""


@data.command("build")
@click.argument("text", type=PATH, nargs=-1, required=True)
@click.option(
    "--tokenizer", "tokenizer_dir", type=PATH, required=True, help="The tokenizer's folder."
)
@click.option(
    "--also",
    type=PATH,
    multiple=True,
    metavar="DIR",
    help="A student's own tokenizer: the same text in its tokens too. May be repeated.",
)
@click.option("--out", type=PATH, required=True, help="The corpus folder to write.")
@click.option("--shard-mb", type=POSITIVE, default=64.0, help="The size of a shard, in MiB.")
@click.option(
    "--workers", type=click.IntRange(1, 1024), default=1, help="How many processes to use."
)
@click.option(
    "--val-fraction",
    type=float,
    default=0.01,
    help="The fraction of the documents to hold out for validation.",
)
@click.option(
    "--task", type=TEXT, metavar="I/N", help="Build slice I of N; `data merge` joins them."
)
@SEPARATOR
@FIELD
@click.option("--keep-duplicates", is_flag=True, help="Keep exact duplicates of documents.")
@click.option(
    "--near-duplicates",
    type=click.FloatRange(0.5, 1.0),
    metavar="SIMILARITY",
    help="Drop and list documents that are at least this similar to an earlier one, such as 0.8.",
)
@click.option("--strict", is_flag=True, help="Stop at the first bad document.")
def data_build(
    text: tuple[str, ...],
    out: str,
    workers: int,
    task: str | None,
    separator: str | None,
    text_field: str | None,
    keep_duplicates: bool,
    strict: bool,
    **settings: Any,
) -> None:
    """Turn TEXT into WebDataset shards.

    TEXT is files, folders, globs, URLs such as s3://, or - for standard input. It may be plain
    text, JSON, CSV, Parquet, WebDataset tars or a folder of the library `datasets`. Repeating the
    command resumes an interrupted build.
    """
    from configs.progress import work
    from data_pipeline import BuildOptions, build
    from data_pipeline.building.reporting import show_on, summary
    from data_pipeline.text.formats import ReadOptions

    if task is not None:
        settings["task"], settings["tasks"] = parse_pair(task, "/", "--task")
    options = BuildOptions(
        text,
        reading=ReadOptions(separator, text_field),
        drop_duplicates=not keep_duplicates,
        skip_problems=not strict,
        **settings,
    )
    with work("building", "MB") as told:
        tree = build(options, out, workers, show_on(told))
    place = f"The corpus is in {out}"
    if task is not None:
        place = f"Slice {task} is built; when all are, run `tandem data merge {out}`"
    click.echo(f"{summary(tree)}\n{place}")


@data.command("merge")
@click.argument("folder", type=PATH, metavar="DIR")
def data_merge(folder: str) -> None:
    """Join the slices that `data build --task` made in DIR."""
    from data_pipeline.building.merging import merge
    from data_pipeline.building.reporting import summary

    click.echo(f"{summary(merge(folder))}\nThe corpus is in {folder}")


@data.command("check")
@click.argument("folder", type=PATH, metavar="DIR")
def data_check(folder: str) -> None:
    """Verify every file of the corpus in DIR."""
    from data_pipeline.building.checking import check

    faults = check(folder)
    for line in faults:
        click.echo(line)
    if faults:
        sys.exit(FAILED)
    click.echo(f"{folder}: every file is as it was built")


@data.command("show")
@click.argument("config", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--samples", type=click.IntRange(min=1), default=4, help="How many samples to show.")
@LEARNER
def data_show(config: str, overrides: tuple[str, ...], samples: int, learner: str | None) -> None:
    """Show padding and a few samples of a job, task or data CONFIG."""
    from rich.console import Console

    from data_pipeline.examples.dumping import show_examples
    from data_pipeline.reading.dumping import show

    data, seed, sizes, views, labels = data_section(config, overrides, learner)
    console, asked = Console(), (data, seed, sizes, samples)
    for text in show_examples(*asked, views, labels) if data.has_examples else show(*asked):
        console.print(text)


@data.command("dump")
@click.argument("config", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--steps",
    type=TEXT,
    metavar="A:B",
    required=True,
    help="Steps from A up to, but not including, B.",
)
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    default=1,
    help="The number of ranks that share each batch.",
)
@click.option("--rank", type=click.IntRange(min=0), default=0, help="The rank, from 0.")
@click.option(
    "--split",
    type=click.Choice(["train", "val"]),
    default="train",
    help="Which part to write: training or held-out.",
)
@click.option("--out", type=PATH, required=True, help="The .npz file to write.")
@LEARNER
def data_dump(
    config: str, overrides: tuple[str, ...], steps: str, out: str, learner: str | None, **share: Any
) -> None:
    """Write exactly what a rank of the job or task CONFIG trains on."""
    from data_pipeline.examples.dumping import dump_examples
    from data_pipeline.reading.dumping import RankSteps, dump

    wanted = RankSteps(*parse_pair(steps, ":", "--steps"), **share)
    data, seed, sizes, views, _ = data_section(config, overrides, learner, wanted.split)
    asked = data, seed, sizes, wanted, out
    rows = dump_examples(*asked, views) if data.has_examples else dump(*asked)
    click.echo(f"{rows} {'examples' if data.has_examples else 'sequences'} are in {out}")


@data.command("augment")
@click.argument("task", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--model", type=PATH, required=True, help="A pre-trained masked language model.")
@click.option("--out", type=PATH, required=True, help="The table to write, .tsv.")
@click.option(
    "--vectors", type=PATH, help="Word vectors in GloVe's format. Default: the model's embeddings."
)
@COPIES
@click.option(
    "--candidates",
    type=click.IntRange(1, 1000),
    default=15,
    help="How many candidates there are for a word's replacement.",
)
@click.option(
    "--probability",
    type=FRACTION,
    default=0.4,
    help="The probability that a word of a copy is replaced.",
)
@click.option(
    "--stop-words",
    type=PATH,
    help="For texts that are not English: a file of words to leave, one on each line.",
)
@SEED
@click.option(
    "--mask-alone",
    is_flag=True,
    help="Predict words from the masked text only, without the original text beside it.",
)
def data_augment(
    task: str,
    overrides: tuple[str, ...],
    model: str,
    out: str,
    vectors: str | None,
    stop_words: str | None,
    mask_alone: bool,
    candidates: int,
    **settings: Any,
) -> None:
    """Augment the training examples of TASK as TinyBERT does.

    It writes a table for `data.train`: each example, and copies in which some words are replaced.
    The candidates for a word are the words that the model predicts in its place. If the word has
    several tokens, they are the words with the nearest vectors. Repeating the command resumes it.
    """
    from data_pipeline.augmentation.replacement import Replacement
    from trainer.augmentation.replacing import Replacing

    how = Replacing(
        Path(model),
        Replacement(**settings),
        candidates,
        None if vectors is None else Path(vectors),
        beside_original=not mask_alone,
        stop_words=None if stop_words is None else Path(stop_words),
    )
    words = (assignment("teacher.init.pretrained", model), *overrides)
    _augmented(task_job(task, words), how, out)


@data.command("perturb")
@click.argument("task", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--out", type=PATH, required=True, help="The table to write, .tsv.")
@click.option("--tagged", type=PATH, help="A file in CoNLL's columns: words with parts of speech.")
@click.option(
    "--tag-column",
    type=click.IntRange(2),
    help="The column of the parts of speech. Default: the last.",
)
@click.option("--encoding", type=ENCODING, default="utf-8", help="The encoding of the tagged file.")
@click.option(
    "--copies",
    type=click.IntRange(1, 1000),
    help="Copies of each example. Default: 20 of a text, 10 of a pair.",
)
@click.option(
    "--mask", type=FRACTION, default=0.1, help="The probability that a word of a copy is masked."
)
@click.option(
    "--replace",
    type=FRACTION,
    default=0.1,
    help="The probability that a word of a copy is replaced.",
)
@click.option(
    "--ngram", type=FRACTION, default=0.25, help="The probability that a copy is cut to an n-gram."
)
@click.option(
    "--longest", type=click.IntRange(1), default=5, help="The most words that --ngram keeps."
)
@click.option(
    "--mask-token",
    type=TEXT,
    help="The token for a masked word. Default: the mask token of data.tokenizer, or [MASK].",
)
@SEED
def data_perturb(
    task: str,
    overrides: tuple[str, ...],
    out: str,
    tagged: str | None,
    tag_column: int | None,
    encoding: str,
    **settings: Any,
) -> None:
    """Augment the training examples of TASK as Tang et al. do.

    It writes a table for `data.train`: each example, and copies in which some words are masked, and
    some are replaced by others of the same part of speech. Some copies are cut to 1 to --longest
    words. Repeating the command resumes it.
    """
    from data_pipeline.augmentation.perturbation import Perturbation
    from trainer.augmentation.augmenting import Perturbing, TaggedFile, mask_token

    if settings["mask"] + settings["replace"] > 1:
        raise click.UsageError("--mask and --replace: their sum must not be more than 1")
    mask = settings.pop("mask_token")
    if mask is not None and mask.split() != [mask]:
        raise click.UsageError("--mask-token: must be one word without white space, as [MASK]")
    if tagged is None and settings["replace"]:
        raise click.UsageError("--tagged: must name a file of parts of speech, or set --replace 0")
    if tagged is None and (tag_column or encoding != "utf-8"):
        raise click.UsageError("--tag-column and --encoding: are for --tagged; remove them")
    file = None if tagged is None else TaggedFile(Path(tagged), tag_column or -1, encoding)
    given = ("teacher.init.pretrained=unread", *overrides)  # a task's YAML leaves it to its user
    job = task_job(task, given)
    token = mask or mask_token(job.data.tokenizer) or Perturbation.mask_token
    _augmented(job, Perturbing(Perturbation(**settings, mask_token=token), file), out)


def _augmented(job: JobConfig, how: Method, out: str) -> None:
    from configs.progress import counted
    from trainer.augmentation.augmenting import augment
    from trainer.device import own_device

    rows, examples = augment(job, how, Path(out), own_device())
    click.echo(f"{counted(rows, 'example')}, made of {examples:,}, are in {out}")
