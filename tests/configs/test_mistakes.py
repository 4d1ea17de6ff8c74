"""A mistake in a YAML file or an override is one line that names the file or the key."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

import configs
from configs import ConfigError
from configs.devices import DeviceConfig
from configs.errors import OverrideError
from tests.configs.example_job import Job, Model, message, write

pytestmark = pytest.mark.usefixtures("shipped")


@pytest.mark.parametrize(
    ("override", "ending"),
    [
        ("stepz=1", "stepz: unknown key; did you mean steps?"),
        ("teacher.modle=small", "teacher.modle: unknown key; did you mean model?"),
        (
            "students.tiny.model.layer=3",
            "students.tiny.model.layer: unknown key; did you mean layers?",
        ),
        (
            "teacher.zzz=1",
            "teacher.zzz: unknown key; there are: model, optimizer, layers, swap, en",
        ),
        ("learning_rate=1", "demo.yaml: learning_rate: unknown key; did you mean teacher.optim"),
        ("lr=1", "lr: unknown key; did you mean teacher.optimizer.learning_rate?"),
        (
            "teacher.dropout=0",
            "teacher.dropout: unknown key; did you mean model.dropout or swap.dropout?",
        ),
        ("step=1", "step: unknown key; did you mean steps?"),
        ("teacher={model:small}", "teacher.model:small: unknown key; write a space after its colo"),
        (
            "teacher.layers[0]=1",
            "teacher.layers: not set, so no item can be changed; give the list, "
            "teacher.layers=[...]",
        ),
        (
            "teacher.ensemble=[{layer: 1}]",
            "teacher.ensemble[0].layer: unknown key; did you mean la",
        ),
        ("teacher.ensemble=[{}, {layers: 0}]", "teacher.ensemble[1].layers must be at least 1"),
        ("teacher.ensemble=[{dropout: x}]", "teacher.ensemble[0].dropout: must be a number, not x"),
        ("teacher.ensemble=3", "teacher.ensemble: expected a list, not 3"),
        ("teacher.ensemble={layers: 3}", "teacher.ensemble: expected a list, not {layers: 3}"),
        ("teacher.model=smal", "teacher.model: smal: no such model config; did you mean small?"),
        ("students.tiny=smal", "students.tiny: expected keys and values (model, optimizer, layer"),
        ("teacher.model=no/such.yaml", "teacher.model: no/such.yaml: no such file"),
        ("teacher.model=''", "teacher.model: the name is empty"),
        ("base=[a, b]", "base: must be the name or the path of one file"),
        ("teacher.base=null", "teacher.base: must be the name or the path of one file"),
        ("steps=many", "steps: must be a whole number, not many"),
        ("steps=2.5", "steps: must be a whole number, not 2.5"),
        ("steps=true", "steps: must be a whole number, not true"),
        ("steps='5'", "steps: must be a whole number, not '5'"),
        ("steps=10000000000000000000", "steps: 10000000000000000000 does not fit into 64 bits"),
        ("steps=" + "9" * 5000, "steps: must be a whole number, not 999"),
        ("steps=???", "steps: must be set; ??? is a placeholder"),
        ("steps=!!int abc", "not valid YAML: could not determine a constructor for the tag"),
        ("steps=${", "steps: no viable alternative at input '${'"),
        ("steps={null: 1}", "not valid YAML: a key must be a word, in line 1"),
        ("steps={[1]: 1}", "not valid YAML: a key must be a word, in line 1"),
        ("steps={a: 1, a: 2}", "not valid YAML: a appears twice, in line 1"),
        ("steps=" + "[" * 100_000, "not valid YAML: more than 40 levels deep"),
        ("steps=&a [*a]", "not valid YAML: "),
        (".".join("a" * 100_000) + "=1", "no key has this many levels"),
        ("students.tiny.model.dropout=x", "students.tiny.model.dropout: must be a number, not x"),
        ("students.tiny.model.dropout=true", "model.dropout: must be a number, not true"),
        ("students.tiny.model.kind=[a]", "students.tiny.model.kind: must be a text, not [a]"),
        ('note="\\0"', "note: has a control character: '\\x00'"),
        ('note="\\ud800"', "not valid YAML: "),
        ("teacher.layers=[1,a]", "teacher.layers[1]: must be a whole number, not a"),
        ("teacher.optimizer.betas=3", "teacher.optimizer.betas: expected a list, not 3"),
        ("teacher.optimizer.fused=7x", "teacher.optimizer.fused: must be true or false, not 7x"),
        ("teacher.optimizer.fused=1", "teacher.optimizer.fused: must be true or false, not 1"),
        ("steps=null", "steps: must not be null"),
        ("steps=0", "demo.yaml: steps must be at least 1"),
        ("teacher.model.layers=0", "demo.yaml: teacher.model.layers must be at least 1"),
        ("students.tiny.swap.layers=0", "students.tiny.swap.layers must be at least 1"),
        ("teacher=[1]", "teacher: expected keys and values, not [1]"),
        ("students=[a]", "students: expected keys and values, not [a]"),
        ("students.tiny=3", "students.tiny: expected keys and values (model, optimizer, layer"),
        ("teacher.model=3", "teacher.model: 3: no such model config"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(override, ending):
    assert ending in message("demo", override)


def test_a_message_names_the_file():
    write("base: demo\nstepz: 3\n")
    assert message("mine.yaml") == "mine.yaml: stepz: unknown key; did you mean steps?"


def test_missing_values_are_named():
    write("name: x\nteacher: {}\n")
    assert message("mine.yaml") == "mine.yaml: steps: must be set"
    write("name: x\nsteps: 5\n")
    assert message("mine.yaml") == "mine.yaml: teacher: must be set"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1\n", "not valid YAML: while parsing a flow sequence in line 1, column 4"),
        ("a: 1\n a: 2\n", "not valid YAML"),
        ("é: 1\nb:\n\tc: 1\n", "in line 3, column 1; this is a tab: indent with spaces"),
        ("a:\n  b: 1\n  \tc: 1\n", "in line 3, column 3; this is a tab: indent with spaces"),
        ("name: x\nname: y\n", "not valid YAML"),
        ("- 1\n- 2\n", "expected keys and values at the top"),
        ("hello\n", "not valid YAML|expected keys and values|cannot be read|unknown key"),
        ("", "is empty"),
    ],
)
def test_a_file_that_is_not_a_config(text, reason):
    write(text)
    assert any(part in message("mine.yaml") for part in reason.split("|"))
    assert message("mine.yaml").startswith("mine.yaml: ")


def test_a_binary_file_a_folder_and_a_missing_file(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(bytes(range(128, 256)))
    assert "binary.yaml: is not UTF-8; convert it" in message(str(tmp_path / "binary.yaml"))
    assert message(str(tmp_path / "here")).endswith(
        "is a folder; give the YAML file of a job config"
    )
    assert message("configs/job") == "configs/job: is a folder; name a YAML file in it"
    os.mkdir("folder")
    assert message("folder") == "folder: is a folder; give the YAML file of a job config"
    assert message("dmo") == "dmo: no such job config; did you mean demo?"
    write("steps: 1\n")
    assert message("mine") == "mine: no such job config; did you mean mine.yaml?"
    assert message("configs/job/dmo.yaml") == (
        "configs/job/dmo.yaml: no such file; did you mean demo.yaml?"
    )
    assert message("nowhere/dmo.yaml") == "nowhere/dmo.yaml: no such file"
    os.mkfifo(tmp_path / "job.yaml")
    told = "job.yaml: is a pipe; write its content to a file"
    assert message(str(tmp_path / "job.yaml")) == str(tmp_path / told)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_file():
    os.chmod(write("steps: 1\n"), 0)
    assert "cannot be read" in message("mine.yaml")


def test_a_file_that_is_its_own_base_is_refused():
    assert message("loop", schema=Model, kind="model").endswith("must not lead back to this file")


@pytest.mark.parametrize("number", ["nan", ".nan", "inf", "-.inf", "1e999"])
def test_numbers_that_are_not_finite_are_refused(number: str):
    key = "teacher.optimizer.learning_rate"
    assert f"{key}: must be a finite number" in message("demo", f"{key}={number}")
    key = "students.tiny.optimizer.betas"
    assert f"{key}[1]: must be a finite number" in message("demo", f"{key}=[0.9,{number}]")


def test_aliases_that_grow_are_refused():
    write("a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in pairwise("abcdefg")
    ))  # fmt: skip
    assert "more than 100,000 values" in message("mine.yaml")


@pytest.mark.parametrize("override", ["steps", "=5", ".steps=5", "teacher..layers=1", "a.=1", ""])
def test_what_is_not_an_override_is_said_to_be_none(override):
    with pytest.raises(OverrideError) as caught:
        configs.load("demo", Job, "job", [override])
    assert str(caught.value) == f"{override!r} is not an override; write key=value"
    assert caught.value.exit_code == 2, "wrong usage"


def test_an_override_that_is_not_yaml():
    assert message("demo", "steps=[1").startswith("'steps=[1': not valid YAML: ")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}\n"])
def test_a_file_that_says_nothing_is_refused(text, tmp_path):
    (tmp_path / "empty.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"empty\.yaml: is empty"):
        configs.load(str(tmp_path / "empty.yaml"), DeviceConfig, "device")
