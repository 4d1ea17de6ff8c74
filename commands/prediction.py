"""The command that applies a fine-tuned model: `tandem predict`."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click

from commands.options import ENCODING, FRACTION, PATH, PLUGINS, TEXT


@click.command()
@click.argument("folder", type=PATH, metavar="DIR")
@click.argument("input_", type=PATH, metavar="INPUT")
@click.option("--out", type=PATH, help="The file to write. Default: standard output.")
@click.option("--head", type=TEXT, help="The task of INPUT, if the model has several.")
@click.option(
    "--column",
    "columns",
    type=TEXT,
    multiple=True,
    metavar="FIELD=COLUMN",
    help="The column that holds a field, by name or number. May be repeated.",
)
@click.option("--encoding", type=ENCODING, help="The encoding of INPUT. [as in training]")
@click.option(
    "--speed",
    type=FRACTION,
    help="For a model with branches: an example leaves at the first layer whose uncertainty is"
    " below this.",
)
@click.option("--documents", type=PATH, help="Rank the documents in this file for each query.")
@click.option("--candidates", type=PATH, help="The ranking that a cross-encoder re-ranks.")
@click.option(
    "--top",
    type=click.IntRange(min=1),
    help="How many documents to find, or to re-rank, for each query. [100]",
)
@PLUGINS
def predict(
    folder: str,
    input_: str,
    out: str | None,
    head: str | None,
    columns: tuple[str, ...],
    encoding: str | None,
    speed: float | None,
    documents: str | None,
    candidates: str | None,
    top: int | None,
) -> None:
    """Apply the fine-tuned model in DIR to the examples in INPUT.

    INPUT is a file in the form of the task's own files, or - for standard input. Labels are not
    read. In a .txt file and on standard input, each line is a text, or two texts with a tab between
    them; for a tagger it may be a raw sentence. For questions, standard input is SQuAD's JSON.

    The command prints one JSON object per line. Its "row" is the number of the line or row of
    INPUT that it answers, from 1. A row without a text gets null. Long sentences and passages are
    read in windows. Other long texts are cut, and their number is printed on stderr. With --speed,
    "layer" is the layer at which the example left. Input from a pipe is answered whenever its
    writer pauses.

    For retrieval, INPUT holds queries. Each query gets its vector, or, with --documents, a ranking.
    """
    from data_pipeline.text.text_files import STDIN
    from trainer.device import own_device
    from trainer.prediction.predicting import predictions
    from trainer.prediction.rankings import rankings

    _refuse_misuse(input_, documents, candidates, top, columns, speed)
    chosen = dict(map(assignment, columns))
    with written(out) as file:
        device = own_device()
        answers = (
            rankings(
                Path(folder), input_, documents, candidates, top or 100, device, head, encoding
            )
            if documents
            else predictions(Path(folder), input_, device, chosen, head, speed, encoding)
        )
        write_lines(file, answers, "predicting", flush=input_ == STDIN)


def _refuse_misuse(
    input_: str,
    documents: str | None,
    candidates: str | None,
    top: int | None,
    columns: Sequence[str],
    speed: float | None,
) -> None:
    """Raise UsageError for options that do not go together."""
    from data_pipeline.text.text_files import STDIN

    for option, value in (("--candidates", candidates), ("--top", top)):
        if value and not documents:
            raise click.UsageError(f"{option}: needs --documents, the file of what is ranked")
    if documents == STDIN:
        raise click.UsageError(
            "--documents: must be a file, because its name says in which form it is"
        )
    if input_ == candidates == STDIN:
        raise click.UsageError("--candidates: standard input is INPUT already; name a file")
    if columns and documents:
        raise click.UsageError("--column: is for tables of texts, and INPUT holds queries")
    if speed is not None and documents:
        raise click.UsageError("--speed: is for classes, and --documents asks for rankings")


def write_lines(file: TextIO, answers: Iterable[Mapping[str, Any]], work: str, flush: bool) -> None:
    """Write each answer as a line of JSON, with the number of its row; `flush` each of them.

    The progress of the `work` is told where the answers themselves do not show it.
    """
    from configs.progress import tracked
    from configs.strict_json import finite

    as_text = (file.encoding or "").lower() in ("utf-8", "utf8")
    if not (flush or file.isatty()):
        answers = tracked(answers, work, "rows")
    for row, answer in enumerate(answers, start=1):
        line = json.dumps(finite({"row": row, **answer}), ensure_ascii=not as_text)
        print(line, file=file, flush=flush)


def assignment(word: str) -> tuple[str, str]:
    """The field and the column in a word of --column. Raises UsageError."""
    field, equals, column = word.partition("=")
    if not (field and equals and column):
        raise click.UsageError(f"--column {word}: must be FIELD=COLUMN, as in text=review")
    return field, column


@contextmanager
def written(out: str | None) -> Iterator[TextIO]:
    """Standard output, a device or a pipe, or a new file, which is named once it is complete.

    Raises DataError where `out` is a file or a folder that exists.
    """
    if out is None:
        yield sys.stdout
    elif _is_stream(Path(out)):  # renaming a file to it would replace the device
        with open(out, "w", encoding="utf-8") as file:
            yield file
    else:
        with new_file(Path(out)) as path, open(path, "x", encoding="utf-8") as file:
            yield file


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Where to write what is named `path` once it is complete. Raises DataError if it exists."""
    from data_pipeline.shards.locking import unfinished
    from data_pipeline.shards.writing import refuse_existing

    refuse_existing([path])
    try:
        with unfinished(path) as part:
            yield part / path.name
            os.replace(part / path.name, path)
    except OSError as error:  # that of a write names no file
        error.filename = error.filename or str(path)
        raise
