"""What the log says of a start."""

from __future__ import annotations

import itertools

import pytest

from trainer import measure


def test_only_the_first_job_of_a_process_waited_for_its_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "_jobs", itertools.count())
    first, second = measure.Startup(), measure.Startup()
    assert "imports 0.00" not in str(first)
    assert str(second) == "first step 0.00 s after the start: imports 0.00"
