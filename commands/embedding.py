"""`tandem embed`: the vectors of texts and words, and how similar they are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from commands.options import PATH, PLUGINS, TEXT
from commands.prediction import assignment, new_file, write_lines, written

if TYPE_CHECKING:
    from trainer.evaluation.text_vectors import TextEncoder, TextVectors, Vector, WordVectors

_SHOWN = 4  # numbers of a vector
_NEIGHBOURS = 5
_COLUMN = 8


@dataclass(frozen=True)
class _Row:
    """A text, or an occurrence of the word, as it is printed: `facts` are its keys in JSON."""

    name: str
    text: str
    vectors: dict[str, Vector]
    facts: dict[str, Any] = field(default_factory=dict)


@click.command()
@click.argument("folder", type=PATH, metavar="DIR")
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...")
@click.option(
    "--pooling",
    type=click.Choice(["cls", "mean", "static"]),
    help="The first token's state, the mean of all states, or the mean of the word embeddings. "
    "By default as the model makes vectors, scaled if it scales them; else the mean.",
)
@click.option(
    "--word", type=TEXT, help="Print the vectors of this word in each text: the mean of its tokens."
)
@click.option(
    "--vectors",
    "vectors_file",
    type=PATH,
    help="Take static vectors from this file, in the text format of GloVe or word2vec.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with whole vectors.")
@click.option(
    "--out",
    type=PATH,
    help="For a file of texts: the file to write the vectors to, .npy or JSON lines.",
)
@click.option(
    "--column",
    "columns",
    type=TEXT,
    multiple=True,
    metavar="text=COLUMN",
    help="The column of the text in a table, by name or number.",
)
@PLUGINS
def embed(
    folder: str,
    texts: tuple[str, ...],
    pooling: str | None,
    word: str | None,
    vectors_file: str | None,
    as_json: bool,
    out: str | None,
    columns: tuple[str, ...],
) -> None:
    """Print the vectors of texts, and their cosine similarities.

    A single TEXT may be the name of a file, or - for standard input. The file has a text on each
    line, or it is a table with the column text. Each row then gets its vector, in JSON lines, or as
    a row of an array in --out FILE.npy. A row without a text gets null, or NaN.
    """
    from data_pipeline.remote import is_remote

    is_file = len(texts) == 1 and (
        texts[0] == "-"
        or os.path.isfile(texts[0])
        or (out is not None and (os.path.lexists(texts[0]) or is_remote(texts[0])))
    )
    if is_file:
        for option, value in (("--word", word), ("--vectors", vectors_file)):
            if value is not None:
                raise click.UsageError(f"{option}: is for texts as arguments, not for a file")
        _embed_file(folder, texts[0], pooling, out, columns)
        return
    for option, given in (("--out", out), ("--column", columns)):
        if given:
            names = texts[0] if len(texts) == 1 else f"{len(texts)} texts"
            raise click.UsageError(
                f"{option}: needs one file of texts, or -, not {names}; the vectors of texts as "
                "arguments are printed, with --json in full"
            )
    if word is not None and not word.strip():
        raise click.UsageError("--word: must not be empty")
    if word is not None and pooling == "cls":
        raise click.UsageError("--pooling cls: is of whole texts; with --word use mean or static")
    from configs.strict_json import strict_json
    from data_pipeline.text.text_files import without_surrogates
    from trainer.evaluation.text_vectors import TextEncoder

    texts = tuple(map(without_surrogates, texts))  # those of a terminal with another encoding
    word = None if word is None else without_surrogates(word)
    vectors = Path(vectors_file) if vectors_file else None
    pooling, rows = _rows(TextEncoder(Path(folder), vectors), texts, word, pooling)
    if as_json:
        click.echo(strict_json({"model": folder, "pooling": pooling, **_tree(rows, pooling)}))
    else:
        similarities = [_table(rows)] if len(rows) > 1 else []
        click.echo("\n\n".join([*(_block(row, pooling) for row in rows), *similarities]))


def _embed_file(
    folder: str, path: str, pooling: str | None, out: str | None, columns: tuple[str, ...]
) -> None:
    from configs.progress import tracked
    from trainer.device import own_device
    from trainer.prediction.embedding import FileEmbedder

    places = dict(map(assignment, columns))
    if out is not None and out.endswith(".npy"):
        with new_file(Path(out)) as part:
            embedder = FileEmbedder(Path(folder), pooling, own_device())
            vectors = tracked(embedder.rows(path, places), "embedding", "rows")
            _write_array(part, vectors, embedder.size)
        return
    with written(out) as file:
        vectors = FileEmbedder(Path(folder), pooling, own_device()).rows(path, places)
        answers = ({"vector": None if vector is None else vector.tolist()} for vector in vectors)
        write_lines(file, answers, "embedding", flush=path == "-")


def _write_array(path: Path, vectors: Iterable[Vector | None], size: int) -> None:
    """Write vectors as an .npy file of float32 [rows, size], one at a time; NaN for None.

    The number of rows is written last: numpy keeps room for it in the header.
    """
    import numpy as np

    def write_header(file: BinaryIO, rows: int) -> int:
        form = {"descr": "<f4", "fortran_order": False, "shape": (rows, size)}
        np.lib.format.write_array_header_1_0(file, form)
        return file.tell()

    none, rows = np.full(size, np.nan, "<f4"), 0
    with open(path, "xb") as file:
        begin = write_header(file, 0)
        for vector in vectors:
            file.write((none if vector is None else vector.astype("<f4")).tobytes())
            rows += 1
        file.seek(0)
        if write_header(file, rows) != begin:
            raise RuntimeError(f"{path}: numpy's header has no room for the number of rows")


def _rows(
    encoder: TextEncoder, texts: Sequence[str], word: str | None, pooling: str | None
) -> tuple[str, list[_Row]]:
    """The pooling (None: the model's own, which is the mean for words) and the rows to print."""
    from trainer.evaluation.text_vectors import MEAN, own_pooling, scaled

    if word is not None:
        pooling = pooling or MEAN
        return pooling, _occurrences(encoder.encode(texts, word), word, pooling)
    pooling, normalises = (pooling, False) if pooling else own_pooling(encoder.model.config)
    rows = _texts(encoder.encode(texts))
    for row in rows if normalises else ():
        row.vectors[pooling] = scaled(row.vectors[pooling])
    return pooling, rows


def _texts(encoded: Sequence[TextVectors]) -> list[_Row]:
    return [
        _Row(
            f"text {number}",
            text.text,
            text.vectors,
            {"tokens": text.tokens, "words": _words(text)},
        )
        for number, text in enumerate(encoded, start=1)
    ]


def _words(text: TextVectors) -> list[dict[str, Any]]:
    """The words of a text in context, and the cosine of [CLS] with each."""
    from trainer.evaluation.text_vectors import CLS, MEAN, cosine

    return [
        {
            "word": word.word,
            "character": word.start + 1,
            "cls_similarity": cosine(text.vectors[CLS], word.vectors[MEAN]),
        }
        for word in text.words
    ]


def _occurrences(encoded: Sequence[TextVectors], word: str, pooling: str) -> list[_Row]:
    from trainer.evaluation.text_vectors import neighbours, occurrences

    rows, all_of_it = [], occurrences(encoded, word)
    for occurrence in all_of_it:
        nearest = [
            {**_place(other), "similarity": similarity}
            for other, similarity in neighbours(occurrence, encoded, pooling, _NEIGHBOURS)
        ]
        name = f"{occurrence.word} in text {occurrence.text + 1}"
        if [other.text for other in all_of_it].count(occurrence.text) > 1:
            name += f", character {occurrence.start + 1}"
        facts = {**_place(occurrence), "neighbours": nearest}
        rows.append(_Row(name, encoded[occurrence.text].text, occurrence.vectors, facts))
    return rows


def _place(word: WordVectors) -> dict[str, Any]:
    return {"word": word.word, "number": word.text + 1, "character": word.start + 1}


def _tree(rows: Sequence[_Row], pooling: str) -> dict[str, Any]:
    """The JSON to print: each vector in full, and the matrix of similarities of each pooling."""
    from trainer.evaluation.text_vectors import similarities

    return {
        "vectors": [
            {"text": row.text, **row.facts, "vector": row.vectors[pooling].tolist()} for row in rows
        ],
        "similarities": {
            name: similarities([row.vectors[name] for row in rows]).tolist()
            for name in rows[0].vectors
        },
    }


def _block(row: _Row, pooling: str) -> str:
    """A text or word with the beginning of its vector, and a word's neighbours."""
    vector = row.vectors[pooling]
    numbers = " ".join(f"{number:.4f}" for number in vector[:_SHOWN].tolist())
    lines = [f"{row.name}: {row.text}", f"  {pooling}: {numbers} ... ({len(vector)} numbers)"]
    if pooling == "cls":
        near = [f"{word['word']} {word['cls_similarity']:.3f}" for word in row.facts["words"]]
        lines.append(f"  cosine of [CLS] with the words: {', '.join(near)}")
    if "neighbours" in row.facts:
        near = [
            f"{word['word']} {word['similarity']:.3f} (text {word['number']})"
            for word in row.facts["neighbours"]
        ]
        lines.append(f"  nearest words: {', '.join(near) or 'there are no other words'}")
    return "\n".join(lines)


def _table(rows: Sequence[_Row]) -> str:
    """The similarity of each pair of rows by each pooling, side by side."""
    from trainer.evaluation.text_vectors import cosine

    pairs = {
        f"{first.name} - {second.name}": (first, second) for first, second in combinations(rows, 2)
    }
    width = max(len("cosine similarity"), *map(len, pairs))
    kinds = list(rows[0].vectors)
    lines = [f"{'cosine similarity':{width}}" + "".join(f"{kind:>{_COLUMN}}" for kind in kinds)]
    for name, (first, second) in pairs.items():
        cells = (cosine(first.vectors[kind], second.vectors[kind]) for kind in kinds)
        lines.append(f"{name:{width}}" + "".join(f"{cell:{_COLUMN}.3f}" for cell in cells))
    return "\n".join(lines)
