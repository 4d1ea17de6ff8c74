"""Commands for tokenizers."""

from pathlib import Path

import click

from commands.options import FIELD, PATH, SEPARATOR, TEXT


@click.group()
def tokenizer() -> None:
    """Train, prune and compare tokenizers."""


@tokenizer.command("train")
@click.argument("text", type=PATH, nargs=-1, required=True)
@click.option(
    "--kind",
    type=TEXT,
    required=True,
    help="wordpiece, bpe or unigram (BERT's, RoBERTa's or ALBERT's), or a plugin's.",
)
@click.option(
    "--plugin",
    "plugins",
    type=PATH,
    multiple=True,
    metavar="FILE",
    help="A Python file with a kind of tokenizer; as often as needed.",
)
@click.option(
    "--vocab-size", type=click.IntRange(min=1), required=True, help="Entries of the vocabulary."
)
@click.option("--out", type=PATH, required=True, help="The folder to write.")
@click.option(
    "--cased/--uncased",
    default=None,
    help="Keep case, or fold it. Default: uncased for wordpiece, cased for the others.",
)
@click.option(
    "--strip-accents",
    is_flag=True,
    help="For wordpiece: drop all accents and vowel signs, as BERT's uncased models do.",
)
@SEPARATOR
@FIELD
def tokenizer_train(
    text: tuple[str, ...],
    kind: str,
    plugins: tuple[str, ...],
    vocab_size: int,
    out: str,
    cased: bool | None,
    strip_accents: bool,
    separator: str | None,
    text_field: str | None,
) -> None:
    """Train a tokenizer on TEXT.

    TEXT is files, folders or globs, which are read as `data build` reads them. It is not standard
    input, because the text is read several times.
    """
    from configs.kinds import import_plugins
    from configs.progress import counted
    from data_pipeline.building.reporting import problem_lines, skipped_lines
    from data_pipeline.text.documents import PROBLEMS_SHOWN
    from data_pipeline.text.formats import ReadOptions
    from data_pipeline.tokenization.tokenizer import load
    from data_pipeline.tokenization.training import train

    import_plugins(plugins)
    reading = ReadOptions(separator, text_field)
    left_out = train(
        text, kind, vocab_size, out, cased=cased, strip_accents=strip_accents, reading=reading
    )
    unusable, sample = left_out.unusable, left_out.sample
    if unusable.count:
        click.echo(counted(unusable.count, "unusable document"))
        click.echo("\n".join(problem_lines(unusable.count, unusable.first)))
    for line in skipped_lines(len(left_out.skipped), left_out.skipped[:PROBLEMS_SHOWN]):
        click.echo(line)
    if sample is not None:
        used = f"{sample.used:,} of {sample.lines:,} lines"
        click.echo(f"{used} are used, drawn evenly from the whole text")
    if left_out.folds_case:
        click.echo("case is folded; --cased keeps capitals")
    if left_out.folds_case and left_out.is_turkish:
        click.echo(
            "warning: the text looks Turkish or Azerbaijani, and folding case takes \u0131 and "
            "\u0130 for other letters; give --cased"
        )
    click.echo("\n".join(left_out.loss.lines()))
    size = load(Path(out))[1].vocab_size
    few = f": {size:,} of {vocab_size:,} entries, since the text has no more"
    click.echo(f"The tokenizer is in {out}{few if size < vocab_size else ''}")


@tokenizer.command("compare")
@click.argument("text", type=PATH)
@click.argument("tokenizers", type=PATH, nargs=-1, required=True, metavar="TOKENIZER...")
@SEPARATOR
@FIELD
def tokenizer_compare(
    text: str, tokenizers: tuple[str, ...], separator: str | None, text_field: str | None
) -> None:
    """Compare how each TOKENIZER cuts TEXT.

    TEXT is read as `data build` reads it. A word is what stands between white space. It is unknown
    if a part of it has no entry. A character is lost if the tokenizer's normalizer removes it, its
    accent or its vowel sign.
    """
    from configs.tables import as_text, plain_table
    from data_pipeline.text.formats import ReadOptions
    from data_pipeline.tokenization.comparison import compare

    headings = ("entries", "tokens/word", "characters/token", "unknown words", "lost characters")
    table = plain_table("tokenizer", *headings)
    for row in compare(text, tokenizers, ReadOptions(separator, text_field)):
        lost = f"{row.loss.share:.2%}"
        table.add_row(
            row.tokenizer,
            f"{row.vocab_size:,}",
            f"{row.tokens_per_word:.2f}",
            f"{row.characters_per_token:.2f}",
            f"{row.unknown_words:.2%}",
            f"{lost} ({row.loss.by_script()})" if row.loss.removed else lost,
        )
    click.echo(as_text(table))


@tokenizer.command("prune")
@click.argument("folder", type=PATH, metavar="DIR")
@click.argument("text", type=PATH, nargs=-1, required=True)
@click.option("--size", type=click.IntRange(min=1), required=True, help="The most entries to keep.")
@click.option("--out", type=PATH, required=True, help="The folder to write.")
@SEPARATOR
@FIELD
def tokenizer_prune(
    folder: str, text: tuple[str, ...], size: int, out: str, separator: str | None, text_field: str
) -> None:
    """Prune the vocabulary in DIR to what TEXT needs.

    DIR holds a model or a tokenizer. Its most frequent entries in TEXT remain, and the model's
    weights for these. TEXT is read as `data build` reads it.
    """
    from data_pipeline.text.formats import ReadOptions
    from data_pipeline.tokenization.pruning import prune
    from data_pipeline.tokenization.tokenizer import save
    from model import describe, prune_folder, require_free, written_whole

    require_free(out)
    pruned = prune(Path(folder), text, size, ReadOptions(separator, text_field))
    with written_whole(Path(out)):
        save(pruned.tokenizer, pruned.roles, Path(out))
        model = prune_folder(folder, out, pruned.kept.tolist())
    entries = f"{len(pruned.kept):,} of {pruned.entries_before:,} entries remain"
    click.echo("\n".join([entries, *pruned.coverage.lines()]))
    sizes = "" if model is None else f", with {describe(model.config).parameters:,} parameters"
    click.echo(f"The {'tokenizer' if model is None else 'model'} is in {out}{sizes}")
