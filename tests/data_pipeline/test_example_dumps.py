"""Dumps of the examples of one task, and of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import (
    BatchSizes,
    DataConfig,
    EncodedExample,
    TaskDataConfig,
    TaskSchedule,
    TextEncoder,
)
from data_pipeline.examples.dumping import dump_examples
from data_pipeline.examples.storing import store_examples
from data_pipeline.reading.dumping import RankSteps
from tests.data_pipeline.test_examples import TEXTS, single

LENGTH, SIZE, SEED = 16, 4, 3


def choices(encoder: TextEncoder) -> Iterator[EncodedExample]:
    for number in range(10):
        texts = [[TEXTS[number], TEXTS[other]] for other in (1, 2, 3)]
        sequences = [encoder.sequence(pair, f"line {number}") for pair in texts]
        yield EncodedExample(sequences, {"choice": number % 3}, columns={"length": number / 4})


@pytest.fixture(scope="module")
def folders(corpus, tmp_path_factory) -> Mapping[str, Path]:
    """The encoded examples of two tasks."""
    encoder = TextEncoder(corpus.tokenizer_dir, LENGTH)
    root = tmp_path_factory.mktemp("dumped")
    found = {"moods": list(single(encoder, TEXTS[:30])), "choice": list(choices(encoder))}
    for name, examples in found.items():
        parts = {"train": examples, "val": examples[:8]}
        store_examples(root / name, encoder, corpus.tokenizer_dir, {}, parts)
    return {name: root / name for name in found}


def dumped(data: DataConfig, out: Path, wanted: RankSteps) -> Mapping[str, np.ndarray]:
    rows = dump_examples(data, SEED, BatchSizes.constant(SIZE), wanted, str(out), {})
    found = np.load(out, allow_pickle=False)
    assert all(len(found[name]) == rows for name in found)
    return found


def test_the_rows_are_the_texts_with_their_labels(corpus, folders, tmp_path) -> None:
    data, vocabulary = DataConfig(path=str(folders["moods"]), train="x"), corpus.vocabulary
    encoder = TextEncoder(corpus.tokenizer_dir, LENGTH)
    parts = [dumped(data, tmp_path / "one", RankSteps(5, 9, rank, 2)) for rank in (0, 1)]
    for part in parts:
        assert part["step"].tolist() == [5, 5, 6, 6, 7, 7, 8, 8]
        assert "task" not in part
        for row, number in enumerate(part["sample_ids"].tolist()):
            (words,) = encoder.sequence([TEXTS[number]], "")
            there = part["attention_mask"][row] == 1
            ids = [vocabulary.cls, *words, vocabulary.sep]
            assert part["input_ids"][row, there].tolist() == ids
            assert (part["input_ids"][row, ~there] == vocabulary.pad).all()
            assert part["labels_mood"][row] == number % 3
            assert part["labels_score"][row] == number / 2
            assert np.flatnonzero(part["labels_tags"][row] != -100).tolist() == [1]
            assert part["labels_tags"][row, 1] == number
    # An epoch of 30 ends in step 7: each example comes once before.
    early = [part["sample_ids"][part["epochs"] == 0] for part in parts]
    assert len(np.unique(np.concatenate(early))) == sum(map(len, early)) == 10


def test_each_row_of_several_tasks_names_its_own(folders, tmp_path) -> None:
    files = {name: TaskDataConfig(path=str(path), train="x") for name, path in folders.items()}
    found = dumped(DataConfig(tasks=files), tmp_path / "both", RankSteps(0, 11))
    schedule = TaskSchedule({"moods": 30, "choice": 10}, SEED, SIZE)
    expected = [schedule.at(step).task for step in range(11)]
    assert found["task"].tolist() == [task for task in expected for _ in range(SIZE)]
    assert set(expected) == {"moods", "choice"}
    choosing = found["task"] == "choice"
    assert found["input_ids"].ndim == 3
    assert found["attention_mask"][choosing].any(axis=2).all()
    assert found["attention_mask"][~choosing].any(axis=2).sum(axis=1).tolist() == [1] * sum(
        ~choosing
    )
    numbers = found["sample_ids"]
    np.testing.assert_array_equal(found["labels_choice"], np.where(choosing, numbers % 3, -100))
    np.testing.assert_array_equal(found["labels_mood"], np.where(choosing, -100, numbers % 3))
    assert np.isnan(found["labels_score"][choosing]).all()
    expected = np.where(choosing, numbers / 4, np.nan)[:, None]
    np.testing.assert_array_equal(found["numbers"], expected)
    assert (found["labels_score"][~choosing] == numbers[~choosing] / 2).all()
