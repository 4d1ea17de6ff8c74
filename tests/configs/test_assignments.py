"""``key=value``, made for any value and read back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import configs
from commands.suites import _root
from configs.yaml_text import Plain


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
