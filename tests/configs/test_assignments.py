"""``key=value``, made for any value and read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import configs
from commands.suite_runs import _root
from configs.yaml_text import Plain
from trainer.config import JobConfig


@given(st.text() | st.lists(st.none() | st.booleans() | st.text()))
def test_an_assignment_is_read_as_what_was_assigned(value):
    word = configs.assignment("a.b", value)
    found = configs.assigned([word])["a"]["b"]
    if isinstance(value, str):
        assert found == value
        assert not isinstance(found, Plain)
    else:
        shown = {None: None, True: "true", False: "false"}
        assert found == [one if isinstance(one, str) else shown[one] for one in value]


def test_a_suites_root_is_found_however_it_is_written():
    assert _root([configs.assignment("data.root", "t\u00e2ches #1")]) == "t\u00e2ches #1"
    assert _root(["data.root=first", "data={root: second}"]) == "second"
    assert _root(["steps=3", "data.root=null"]) == ""


@pytest.mark.parametrize("word", ["data.test=", "data.test=null", "data.test=''", "data={test: }"])
def test_a_file_that_a_config_names_is_cleared(word):
    given = ["data.train=a.tsv", "data.test=b.tsv", "teacher.init.pretrained=x", word]
    job = configs.load("single_sentence", JobConfig, "task", given)
    assert job.data.test == ""
    assert configs.load_text(configs.dump(job), JobConfig, "task", [], "").data.test == ""


def test_a_text_that_has_a_value_by_default_is_not_cleared():
    with pytest.raises(configs.ConfigError, match=r"^.*teacher\.precision: must not be null"):
        configs.load("bert", JobConfig, "job", ["teacher.precision="])


@pytest.mark.parametrize("word", ["log.notes=issue #5", "log.notes=#5", "data.mixture=[a, b] # c"])
def test_an_assignment_whose_end_yaml_would_leave_out_is_refused(word):
    with pytest.raises(configs.ConfigError, match=r"# starts a comment; put the value in quotes"):
        configs.assigned([word])
    assert configs.assigned(["a='issue #5'", "b=x#5"]) == {"a": "issue #5", "b": "x#5"}


@pytest.mark.parametrize("word", ["name=\udcff", "name=a: \udce9"])
def test_an_assignment_in_another_encoding_is_refused(word):
    with pytest.raises(configs.ConfigError, match=r"^'name=.*': is not UTF-8; write it in UTF-8"):
        configs.assigned([word])
