"""The words for a machine, and for the time that a start took."""

from __future__ import annotations

import itertools
import re

from trainer import measure


def test_the_machine_in_a_few_words():
    assert re.fullmatch(r".+, \d+ cores?, \d+ GiB", measure.describe_machine())


def test_the_name_of_a_processor_is_short(monkeypatch, tmp_path):
    facts = tmp_path / "cpuinfo"
    facts.write_text("model name\t: Intel(R) Xeon(R) Gold CPU @ 2.50GHz\n")
    monkeypatch.setattr(measure, "CPU_FACTS", facts)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert measure.describe_machine().startswith("Intel Xeon Gold, ")


def test_a_processor_without_a_name(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "CPU_FACTS", tmp_path / "none")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert measure.describe_machine().split(",")[0]


def test_only_the_first_job_of_a_process_waited_for_its_imports(monkeypatch):
    monkeypatch.setattr(measure, "_jobs", itertools.count())
    first, second = measure.Startup(), measure.Startup()
    assert "imports 0.00" not in str(first)
    assert str(second) == "first step 0.00 s after the start: imports 0.00"
