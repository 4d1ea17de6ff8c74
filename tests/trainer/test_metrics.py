import json
import math
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import TrainingError
from trainer.record import metrics


def log(path, *rows):
    with metrics.MetricsLog(path) as file:
        for row in rows:
            file.append(row)


def bits(value):
    return struct.pack("<d", value)


@given(st.floats(width=64), st.floats(width=32))
def test_a_float_comes_back_with_the_same_bits(double, single):
    row = metrics.decode(
        metrics.encode({"step": 1, "double": double, "single": np.float32(single)})
    )
    if math.isnan(double):
        assert math.isnan(row["double"])
    else:
        assert bits(row["double"]) == bits(double)
    assert np.array_equal(np.float32(row["single"]), np.float32(single), equal_nan=True)


def test_lines_are_strict_json_even_with_nan_and_infinity():
    row = {"step": 3, "a": math.nan, "b": math.inf, "c": -math.inf}

    def refuse(constant):
        raise AssertionError(constant)

    line = json.loads(metrics.encode(row), parse_constant=refuse)
    assert line == {"step": 3, "a": "NaN", "b": "Infinity", "c": "-Infinity"}


def test_a_row_is_in_the_file_when_append_returns(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    program = (
        "import os, sys, pathlib; from trainer.record.metrics import MetricsLog\n"
        "MetricsLog(pathlib.Path(sys.argv[1])).append({'step': 7}); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, path], check=False).returncode == -9
    assert metrics.read(path) == [{"step": 7}]


def test_a_torn_last_line_is_ignored_and_dropped_before_the_next_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log(path, {"step": 1}, {"step": 2, "teacher/loss": 3.25})
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 2, len(whole)):
        path.write_bytes(whole[:cut])
        assert metrics.read(path) == [{"step": 1}]
    log(path, {"step": 2, "teacher/loss": 3.5})
    assert metrics.read(path) == [{"step": 1}, {"step": 2, "teacher/loss": 3.5}]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(TrainingError, match=r"metrics\.jsonl: line 2 .*; repair or remove"):
        metrics.read(path)


def test_no_file_has_no_rows(tmp_path):
    assert metrics.read(tmp_path / "metrics.jsonl") == []
    assert metrics.cut_back(tmp_path / "metrics.jsonl", 5) == 0


def test_cut_back_removes_later_rows_and_keeps_the_others_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log(path, *[{"step": step, "loss": 1 / (step + 1)} for step in range(6)], {"step": 3, "v": 1})
    lines = path.read_bytes().splitlines(keepends=True)
    assert metrics.cut_back(path, 3) == 2
    assert path.read_bytes() == b"".join(lines[:4] + lines[6:])
    assert metrics.cut_back(path, 3) == 0
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_cut_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    log(path, {"step": 1}, {"step": 2})
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space") as failed:
        metrics.cut_back(path, 1)
    assert failed.value.filename == str(path)
    assert path.read_bytes() == before


def test_series_and_learners():
    rows = [
        {"step": 1, "tokens": 10, "students/b/loss": 4.0, "teacher/loss": 2.0, "teacher/lr": 0.1},
        {"step": 2, "tokens": 20, "teacher/loss": 1.0},
        {"step": 2, "val/prose/students/a/loss": 3.0, "val/prose/teacher/accuracy": 0.5},
    ]
    assert metrics.learners(rows) == ["teacher", "students/b", "students/a"]
    assert metrics.series(rows, "teacher/loss", against="tokens") == ([10, 20], [2.0, 1.0])
    assert metrics.series(rows, "val/prose/teacher/accuracy") == ([2], [0.5])
