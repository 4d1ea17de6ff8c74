import json
import math
import os
import resource
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import TrainingError
from trainer.run_folder import metrics
from trainer.run_folder.metrics import MetricsLog, Resumed, resume


def log(path, *rows):
    with MetricsLog(path) as file:
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
        "import os, sys, pathlib; from trainer.run_folder.metrics import MetricsLog\n"
        "MetricsLog(pathlib.Path(sys.argv[1])).append({'step': 7}); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", program, path], check=False, timeout=120)
    assert killed.returncode == -9
    assert metrics.read(path) == [{"step": 7}]


def test_a_torn_last_line_is_ignored_and_dropped_when_the_run_resumes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log(path, {"step": 1}, {"step": 2, "teacher/loss": 3.25})
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 2, len(whole)):
        path.write_bytes(whole[:cut])
        assert metrics.read(path) == [{"step": 1}]
    resume(path, step=2)
    log(path, {"step": 2, "teacher/loss": 3.5})
    assert metrics.read(path) == [{"step": 1}, {"step": 2, "teacher/loss": 3.5}]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(TrainingError, match=r"metrics\.jsonl: line 2 .*; repair or delete"):
        metrics.read(path)


@pytest.mark.parametrize("tail", ['[{"format": 1}]', "steps", "null", '{"step": null}\n'])
def test_a_last_line_that_was_never_a_row_is_named(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + tail)
    with pytest.raises(TrainingError, match=r"metrics\.jsonl: line 2 is not a row"):
        metrics.read(path)
    assert resume(path, 2) == Resumed(1, 0, 0)


def test_nuls_after_a_power_loss_are_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bytes(40))
    assert metrics.read(path) == [{"step": 1}]


def test_no_file_has_no_rows(tmp_path):
    assert metrics.read(tmp_path / "metrics.jsonl") == []
    assert resume(tmp_path / "metrics.jsonl", 5) == Resumed(0, 0, 0)
    assert os.listdir(tmp_path) == []


def test_a_resumed_run_has_no_later_rows_and_the_others_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log(path, *[{"step": step, "loss": 1 / (step + 1)} for step in range(6)], {"step": 3, "v": 1})
    lines = path.read_bytes().splitlines(keepends=True)
    for _ in range(2):
        assert str(resume(path, 3, expected=5)) == ""
        assert path.read_bytes() == b"".join(lines[:4] + lines[6:])
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_resume_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    log(path, {"step": 1}, {"step": 2})
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space") as failed:
        resume(path, 1)
    assert failed.value.filename == str(path)
    assert path.read_bytes() == before


def whole_log(path):
    """A log of 40 steps, every fourth with a held-out row, and the rows in its checkpoint."""
    with MetricsLog(path) as file:
        for step in range(1, 41):
            file.append({"step": step, "teacher/loss": 1 / step})
            if step % 4 == 0:
                file.append({"step": step, "val/data/teacher/loss": 2 / step})
        kept = file.rows_for_checkpoint()
        file.append({"step": 41})
        return kept(), 50


DAMAGES = {
    "cut": lambda whole: whole[: len(whole) // 2],
    "ends in NULs": lambda whole: whole[: len(whole) // 2] + bytes(len(whole) // 2),
    "NULs, and rows after them": lambda whole: whole[:700] + bytes(900) + whole[1600:],
    "gone": lambda whole: None,
    "empty": lambda whole: b"",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_rows_that_the_disk_lost_are_said_and_come_back_from_the_checkpoint(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    kept, rows = whole_log(path)
    resume(path, 40)
    whole = path.read_bytes()
    assert kept == whole
    rest = damage(whole)
    path.unlink() if rest is None else path.write_bytes(rest)
    resumed = resume(path, 40, kept, rows)
    assert path.read_bytes() == whole
    assert (resumed.rows, resumed.lost) == (50, 0)
    assert str(resumed) == (
        f"metrics.jsonl lacked {resumed.restored} of 50 rows: {resumed.restored} restored from "
        f"the checkpoint, 0 lost"
    )
    assert 5 < resumed.restored <= 50


def test_what_is_older_than_the_checkpoint_keeps_is_said_to_be_lost(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setattr(metrics, "KEPT_BYTES", 500)
    kept, rows = whole_log(path)
    resume(path, 40)
    whole = path.read_bytes()
    assert len(kept) <= 500
    assert whole.endswith(kept)
    path.write_bytes(whole[:1000])
    there, few = len(metrics.read(path)), kept.count(b"\n")
    resumed = resume(path, 40, kept, rows)
    assert resumed == Resumed(there + few, few, 50 - there - few)
    assert path.read_bytes() == whole[: whole.rfind(b"\n", 0, 1000) + 1] + kept


def test_rows_that_find_no_room_wait_and_are_written_once(tmp_path):
    """A limit on the file size simulates a disk that fills up in the middle of a row."""
    path = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsLog(path) as file:
        file.append({"step": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
        try:
            for step in (2, 3, 4):
                file.append({"step": step})
            assert file.error
            kept = file.rows_for_checkpoint()()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert metrics.read(path) == [{"step": 1}]
        file.append({"step": 5})
        assert not file.error
    assert [row["step"] for row in metrics.read(path)] == [1, 2, 3, 4, 5]
    assert [json.loads(line)["step"] for line in kept.splitlines()] == [1, 2, 3, 4]


def test_rows_share_their_keys():
    first, second = (metrics.decode(b'{"step": 1, "students/a/loss": 2.0}') for _ in range(2))
    assert all(key is same for key, same in zip(first, second, strict=True))


def test_a_resume_reads_each_line_once(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    log(path, *({"step": step} for step in range(10)))
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[6:8])
    read, decode = [], metrics.decode
    monkeypatch.setattr(metrics, "decode", lambda line: read.append(line) or decode(line))
    assert resume(path, 7, kept, 8) == Resumed(8, 0, 0)
    assert len(read) == 12  # of the file, and of the checkpoint's copy
    assert [row["step"] for row in metrics.read(path)] == list(range(8))


def test_series():
    rows = [
        {"step": 1, "tokens": 10, "students/b/loss": 4.0, "teacher/loss": 2.0, "teacher/lr": 0.1},
        {"step": 2, "tokens": 20, "teacher/loss": 1.0},
        {"step": 2, "val/prose/students/a/loss": 3.0, "val/prose/teacher/accuracy": 0.5},
    ]
    assert metrics.series(rows, "teacher/loss") == ([1, 2], [2.0, 1.0])
    assert metrics.series(rows, "val/prose/teacher/accuracy") == ([2], [0.5])
