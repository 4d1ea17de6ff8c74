"""The labels in a task's training file."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline import DataError
from trainer.objectives.task import TaskFile, labels_among


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("", "a.tsv:3: label: is empty; give one, or set unlabelled: true"),
        ("???", "a.tsv:3: label: '???' is a placeholder or has a control character"),
        ("t\x92", "a.tsv:3: label: 't\\x92' is a placeholder or has a control character"),
        ("dull", "a.tsv: has only one label, 'dull'; a task needs two"),
    ],
)
def test_labels_that_no_task_can_have(label: str, message: str) -> None:
    file, rows = TaskFile(Path("a.tsv"), {}), [("a.tsv:2", "dull"), ("a.tsv:3", label)]
    with pytest.raises(DataError) as refused:
        labels_among(file, rows)
    assert str(refused.value).startswith(message)
