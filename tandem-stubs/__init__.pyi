# ruff: noqa: I001
# The module `tandem` for type checkers, which read no types from a module that is one file.
import click
from commands.api import (
    build_corpus as build_corpus,
    embed as embed,
    evaluate as evaluate,
    export as export,
    from_pretrained as from_pretrained,
    load as load,
    predict as predict,
    train as train,
)

main: click.Group
