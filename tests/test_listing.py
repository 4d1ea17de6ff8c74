"""`tandem list`: every shipped name, with what it is."""

from __future__ import annotations

import json

import pytest

from configs import SHIPPED
from tests.conftest import tandem

KINDS = ("models", "jobs", "tasks", "terms", "optimizers", "schedules")


def listed(*words: str) -> dict[str, str]:
    return json.loads(tandem("list", *words, "--json").stdout)


@pytest.mark.parametrize("kind", ["model", "job", "task", "data", "cluster", "device", "suite"])
def test_every_shipped_file_is_listed_with_what_it_is(kind):
    entries = listed(kind if kind == "data" else f"{kind}s")
    assert sorted(entries) == sorted(path.stem for path in (SHIPPED / kind).glob("*.yaml"))
    for name, line in entries.items():
        assert 10 < len(line) < 200, f"{name}: {line}"
        assert "schema=" not in line


def test_what_a_file_is_ends_with_its_first_sentence():
    entries = listed("models")
    assert entries["bert_base"] == "BERT-base (arXiv 1810.04805): 109,482,240 parameters"
    tasks = listed("tasks")
    assert tasks["single_sentence"] == (
        "Texts with a label each, in a table with the columns text and label"
    )
    assert tasks["cola"].startswith("CoLA of GLUE: is a sentence grammatical (1)?")


def test_a_formula_is_not_cut_at_a_mark_in_it():
    terms = listed("terms")
    assert terms["soft_cross_entropy"] == (
        "-softmax(t / T') . log softmax(s / T) at masked positions, without T^2"
    )
    assert terms["decoupled_kd"].endswith("(arXiv 2203.08679, eq. 7)")
    for lines in listed().values():
        for name, line in lines.items():
            assert line.count("(") == line.count(")"), f"{name}: {line}"


@pytest.mark.parametrize("kind", ["terms", "optimizers", "schedules", "trackers"])
def test_every_entry_of_a_registry_is_listed_with_what_it_is(kind):
    entries = listed(kind)
    known = {"terms": "soft_kl", "optimizers": "muon", "schedules": "wsd", "trackers": "mlflow"}
    assert known[kind] in entries
    for name, line in entries.items():
        assert 10 < len(line) < 300, f"{name}: {line}"


def test_without_a_kind_all_names_are_listed():
    shown = tandem("list")
    assert shown.returncode == 0, shown.stderr
    for kind in KINDS:
        assert f"{kind}: " in shown.stdout
    everything = listed()
    assert set(KINDS) <= set(everything)
    assert everything["jobs"] == listed("jobs")


def test_lines_fit_into_80_columns():
    for words in [[], ["tasks"]]:
        lines = tandem("list", *words, COLUMNS="80").stdout.splitlines()
        assert max(map(len, lines)) <= 80


def test_another_word_is_refused_with_those_that_there_are():
    refused = tandem("list", "modles")
    assert refused.returncode == 2
    assert "'models'" in refused.stderr
