"""The files beside an exported model: how its task was read (``task.json``), its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from configs import ConfigError
from configs.errors import OptionError
from configs.rules import COUNT, TEXT_ENCODING
from configs.section import Section
from configs.strict_json import from_json, read_json
from configs.typed import nearest_of_all
from data_pipeline import DataError, TextEncoder
from data_pipeline.tokenization.tokenizer import Vocabulary
from model import ModelConfig, ModelError, longest_text
from trainer.objectives.task import TaskConfig


def open_encoder(folder: Path, config: ModelConfig, sequence_length: int) -> TextEncoder:
    """The encoder of texts for the model in `folder`, into at most `sequence_length` tokens.

    Fewer where the model does not read as many (`longest_text`). Raises DataError without its
    tokenizer.
    """
    longest = longest_text(folder, config) or sequence_length
    encoder = TextEncoder(folder, min(sequence_length, longest))
    require_own_tokenizer(folder, encoder.vocabulary, config)
    return encoder


def require_own_tokenizer(folder: Path, vocabulary: Vocabulary, config: ModelConfig) -> None:
    """Raise DataError where the tokenizer in `folder` has tokens that its model lacks."""
    if vocabulary.vocab_size > config.vocab_size:
        raise DataError(
            f"{folder}: its tokenizer has more tokens than its model; it belongs to another model"
        )


FILE = "task.json"
HEADS = "heads"  # where a model has several: the facts of each
Task = TypeVar("Task", bound=TaskConfig)


@dataclass(frozen=True)
class TaskFacts(Section):
    """The form of a task's examples; the defaults are those of any model of single texts.

    fields: the texts of an example in a table. columns: where the fields stand, by name, unless
    under their own. sequence_length: the longest that was trained on. encoding: that of
    its files. settings: the task's own. scores: the model's on the
    validation file, such as the threshold for no answer.
    """

    fields: Sequence[str] = ("text",)
    columns: Mapping[str, str] = field(default_factory=dict)
    sequence_length: Annotated[int, COUNT] = 512
    settings: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    encoding: Annotated[str, TEXT_ENCODING] = "utf-8"

    @classmethod
    def read(cls, folder: Path, head: str) -> TaskFacts:
        """The facts of a head of an exported model; the defaults for another program's."""
        path = folder / FILE
        if not path.exists():
            return cls()
        try:
            tree = read_json(path)
            if isinstance(tree, dict) and HEADS in tree:
                tree = from_json(tree, _SeveralHeads, path).heads.get(head)
            if isinstance(tree, dict) and "fields" not in tree:
                raise ConfigError(f"{path}: fields: must be set")
            return from_json(tree, cls, path)
        except (OSError, ConfigError) as error:
            raise ModelError(f"{error}; export the model again") from None

    def in_encoding(self, encoding: str | None) -> TaskFacts:
        """These facts for a file in another character encoding; None: in that of training."""
        return self if encoding is None else replace(self, encoding=encoding)

    def section(self, kind: type[Task]) -> Task:
        """The task's section as the model was trained with it; the defaults for other models."""
        try:
            return from_json(self.settings, kind, f"{FILE}: settings")
        except ConfigError as error:
            raise ModelError(f"{error}; export the model again") from None

    def with_columns(self, columns: Mapping[str, str], others: Sequence[str] = ()) -> TaskFacts:
        """These facts with other places for some fields, or for `others` that are no texts.

        Raises OptionError for unknown fields.
        """
        for name in columns:
            if name not in self.fields and name not in others:
                hint = nearest_of_all(name, [*self.fields, *others])
                raise OptionError(f"--column {name}: no such field{hint}")
        return replace(self, columns={**self.columns, **columns})


def chosen_head(folder: Path, heads: Sequence[str], head: str | None) -> str:
    """The head that is used of the model in `folder`: the one that is named, or the only one.

    Raises OptionError for another name, ModelError for a model without heads, or with several where
    none of them is named.
    """
    if not heads:
        raise ModelError(f"{folder}: has no head of a task; fine-tune it with `tandem finetune`")
    if head is None and len(heads) > 1:
        raise ModelError(f"{folder}: has several heads; choose one with --head: {', '.join(heads)}")
    if head is not None and head not in heads:
        raise OptionError(f"--head: {folder} has no head {head}; there are: {', '.join(heads)}")
    return head or heads[0]


@dataclass(frozen=True)
class _SeveralHeads:
    heads: Mapping[str, Any]


def write_facts(folder: Path, facts: Mapping[str, TaskFacts]) -> None:
    """Write the file of an exported model; `facts`: of the task of each head, one or more."""
    trees = {head: asdict(of_head) for head, of_head in facts.items()}
    tree = {HEADS: trees} if len(trees) > 1 else next(iter(trees.values()))
    (folder / FILE).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
