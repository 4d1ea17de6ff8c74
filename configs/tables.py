"""Tables without lines, as plain text for terminals and pipes."""

import io

from rich.console import Console
from rich.table import Table

WIDTH = 10_000  # wider than any table


def plain_table(first: str, *others: str) -> Table:
    """A table without lines, with these headings; all columns but the first are numbers."""
    table = Table(first, box=None, pad_edge=False, header_style="")
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def as_text(table: Table) -> str:
    """The lines of a table, without colours; none is wrapped, so that paths can be copied."""
    out = io.StringIO()
    # Cells hold a user's words: [b] in a label or a path is no markup.
    Console(file=out, width=WIDTH, color_system=None, markup=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
