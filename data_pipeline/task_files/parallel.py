"""Texts and their translations: tables, and parallel files with a text a line (Multi30k)."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from configs.progress import counted
from data_pipeline.errors import DataError
from data_pipeline.task_files.contents import UTF_8, not_empty, place, read_lines
from data_pipeline.task_files.tables import TABLES, Columns, is_table, read_table
from data_pipeline.text.text_files import STDIN

SOURCE, TARGET = "source", "target"


@dataclass(frozen=True)
class TextPair:
    """A text, its translation, and where they stand."""

    where: str
    source: str
    target: str

    @property
    def is_blank(self) -> bool:
        """Whether both texts are empty."""
        return not (self.source or self.target)


@dataclass(frozen=True)
class Languages:
    """Both languages, as the names of parallel files end: de and en of train.de, train.en."""

    source: str
    target: str

    def files(self, path: str) -> tuple[str, ...]:
        """The files that hold the pairs at `path`: a table, or both of two parallel files.

        Raises DataError for the name of neither.
        """
        if is_table(path):
            return (path,)
        name = Path(path).name.split(".")
        if not self.source or name[1:].count(self.source) != 1:
            raise DataError(
                f"{path}: is no table ({', '.join(TABLES)}), and its name does not have "
                f".source_language once ({self.source or 'not set'}), as train.de does where that "
                "is de"
            )
        at = name.index(self.source, 1)
        other = ".".join([*name[:at], self.target, *name[at + 1 :]])
        return path, str(Path(path).with_name(other))


def read_pairs(
    path: str, columns: Columns, languages: Languages, encoding: str = UTF_8
) -> Iterator[TextPair]:
    """The pairs at `path`, a table with `SOURCE` and `TARGET` or one of two parallel files.

    A blank row is a pair without texts. Raises DataError where there are none, or where one of two
    files has more lines.
    """
    files = languages.files(path)
    if len(files) == 1:
        for where, row in read_table(path, columns, encoding=encoding):
            yield TextPair(where, row.get(SOURCE, ""), row.get(TARGET, ""))
        return
    both = zip_longest(*(read_lines(file, encoding) for file in files))
    for number, (first, second) in enumerate(not_empty(both, path, "lines"), 1):
        if first is None or second is None:
            short, long = files if first is None else files[::-1]
            why = f"ends after {counted(number - 1, 'line')}, and {long} does not"
            raise DataError(f"{short}: {why}; line N of one must translate line N of the other")
        yield TextPair(place(path, number), first[1].strip(), second[1].strip())


def read_sources(path: str, columns: Columns, encoding: str = UTF_8) -> Iterator[tuple[str, str]]:
    """(where, text) of what is to be translated: a table's column `SOURCE`, or each line."""
    if path != STDIN and is_table(path):
        column = {SOURCE: columns[SOURCE]}
        for where, row in read_table(path, column, encoding=encoding):
            yield where, row.get(SOURCE, "")
        return
    for number, line in read_lines(path, encoding):
        yield place(path, number), line.strip()
