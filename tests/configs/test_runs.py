"""What the processes of a run and the commands about it agree on."""

import os
from pathlib import Path

import pytest

from configs.runs import REVISION, is_alive, remarks_in, revision_in, started


def test_a_process_may_have_any_name():
    name = Path("/proc/self/comm")
    before, begun = name.read_bytes(), started(os.getpid())
    name.write_bytes(b"caf\xc3")  # the system cuts a name after 15 bytes, also inside of a letter
    try:
        assert is_alive(os.getpid(), begun)
    finally:
        name.write_bytes(before)


def test_remarks_are_none_where_their_file_cannot_be_read(tmp_path):
    file = tmp_path / "setbacks.json"
    assert remarks_in(file) == []
    file.write_text('[{"says": "half is worse"}, {"says": "tiny is worse"}]')
    assert remarks_in(file) == ["half is worse", "tiny is worse"]
    for damaged in ('[{"says": "half', "[{}]", '{"says": "half"}', "7", "[" * 10**5):
        file.write_text(damaged)
        assert remarks_in(file) == []
    file.unlink()
    file.mkdir()
    assert remarks_in(file) == []


@pytest.mark.parametrize(
    ("text", "revision"),
    [(f"{REVISION}1a2b3c4\nname: a\n", "1a2b3c4"), (f"name: a\n{REVISION}1a2b3c4\n", ""), ("", "")],
)
def test_the_revision_is_in_the_first_line(text, revision):
    assert revision_in(text) == revision
