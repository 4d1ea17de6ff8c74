from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import configs
from configs import ConfigError, loading
from configs.devices import DeviceConfig


@dataclass
class Model:
    layers: int = 2
    dropout: float = 0.1
    kind: str = "bert"

    def __post_init__(self):
        if self.layers < 1:
            raise ValueError("layers must be at least 1")


@dataclass
class Optimizer:
    learning_rate: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    fused: bool = False


@dataclass
class Learner:
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    layers: list[int] | None = None
    swap: Model | None = None
    ensemble: list[Model] = field(default_factory=list)


@dataclass
class Job:
    name: str
    steps: int
    teacher: Learner
    students: dict[str, Learner] = field(default_factory=dict)
    note: str | None = None

    def __post_init__(self):
        if self.steps < 1:
            raise ValueError("steps must be at least 1")


@dataclass
class Anything:
    job: dict[str, Any]


@pytest.fixture(autouse=True)
def shipped(tmp_path, monkeypatch):
    """A folder of shipped configs, and another folder as working directory."""
    folder = tmp_path / "shipped"
    files = {
        "job/demo": "name: demo\nsteps: 100\nteacher: {model: small}\n"
        "students:\n  tiny: {model: {base: small, layers: 1}}\n  half:\n",
        "job/long": "base: demo\nsteps: 1000\nteacher: {optimizer: {learning_rate: 1e-4}}\n",
        "job/other_teacher": "base: demo\nteacher:\n  model: {base: large, dropout: 0.5}\n",
        "model/small": "layers: 4\ndropout: 0.2\n",
        "model/large": "layers: 24\n",
        "model/deeper": "base: large\nlayers: 48\n",
        "model/loop": "base: loop_back\n",
        "model/loop_back": "base: loop\n",
    }
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(loading, "SHIPPED", folder)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return folder


def load(name="demo", *overrides):
    return configs.load(name, Job, "job", overrides)


def message(name, *overrides, schema=Job, kind="job"):
    with pytest.raises(ConfigError) as caught:
        configs.load(name, schema, kind, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def write(text, name="mine.yaml"):
    with open(name, "w", encoding="utf-8") as file:
        file.write(text)
    return name


# Composition


def test_a_file_is_merged_over_the_defaults():
    job = load()
    assert job == Job(
        name="demo",
        steps=100,
        teacher=Learner(model=Model(layers=4, dropout=0.2)),
        students={"tiny": Learner(model=Model(layers=1, dropout=0.2)), "half": Learner()},
    )


def test_base_starts_from_another_file_and_the_other_keys_change_it():
    job = load("long")
    assert (job.name, job.steps) == ("demo", 1000)
    assert job.teacher.model == Model(layers=4, dropout=0.2)
    assert job.teacher.optimizer.learning_rate == 1e-4
    assert configs.load("deeper", Model, "model") == Model(layers=48)


def test_a_shipped_file_named_by_its_path_begins_with_others_of_its_kind(shipped):
    (shipped / "task").mkdir()
    (shipped / "task/pair.yaml").write_text("name: pair\nsteps: 3\nteacher: {}\n")
    (shipped / "task/mrpc.yaml").write_text("base: pair\nnote: x\n")
    assert load("configs/task/mrpc.yaml") == Job("pair", 3, Learner(), note="x")
    assert load(write("base: configs/task/mrpc.yaml\nsteps: 4\n")).steps == 4
    assert "base: pair: no such job config" in message(write("base: pair\n"))


def test_what_may_be_anything_may_be_nothing():
    study = configs.load_text("job: {epochs: null}", Anything, "study", [], "x")
    assert study == Anything({"epochs": None})


def test_a_section_with_its_own_base_keeps_nothing_of_the_one_it_replaces():
    assert load("other_teacher").teacher.model == Model(layers=24, dropout=0.5)


def test_a_file_outside_the_shipped_ones_is_a_section_or_a_base_too():
    write("layers: 9\n", "model.yaml")
    write("base: demo\nteacher: {model: ./model.yaml}\n")
    assert load("mine.yaml").teacher.model == Model(layers=9)
    assert load("demo", "teacher.model=model.yaml").teacher.model == Model(layers=9)


def test_a_shipped_path_is_found_from_any_folder(shipped):
    assert load("configs/job/demo.yaml") == load("demo")
    assert load(str(shipped / "job" / "demo.yaml")) == load("demo")


def test_a_file_here_does_not_hide_a_shipped_name():
    write("steps: 1\n", "demo")
    assert load("demo").steps == 100


def test_empty_sections_mean_defaults_and_empty_students_mean_none():
    write("base: demo\nteacher:\nstudents:\nnote:\n")
    job = load("mine.yaml")
    assert (job.teacher, job.students, job.note) == (Learner(), {}, None)
    assert job.teacher.swap is None


# Overrides


def test_overrides_come_last_and_reach_into_sections_given_by_name():
    job = load("demo", "steps=7", "teacher.model.dropout=0", "students.tiny.model.layers=3")
    assert job.steps == 7
    assert job.teacher.model == Model(layers=4, dropout=0.0)
    assert job.students["tiny"].model == Model(layers=3, dropout=0.2)


def test_an_override_may_name_a_section_and_a_later_one_change_it():
    job = load("demo", "teacher.model=large", "teacher.model.dropout=0.3")
    assert job.teacher.model == Model(layers=24, dropout=0.3)
    job = load("demo", "teacher.model.dropout=0.3", "teacher.model=large")
    assert job.teacher.model == Model(layers=24, dropout=0.1)


def test_an_override_adds_a_student_a_list_and_an_optional_section():
    job = load("demo", "students.new.model=small", "teacher.layers=[0, 2]", "teacher.swap.layers=4")
    assert job.students["new"].model == Model(layers=4, dropout=0.2)
    assert job.teacher.layers == [0, 2]
    assert job.teacher.swap == Model(layers=4)
    assert load("demo", "teacher.swap.layers=4", "teacher.swap=null").teacher.swap is None


def test_a_list_of_sections():
    assert load("demo", "teacher.ensemble=[{layers: 3}, {}]").teacher.ensemble == [
        Model(layers=3),
        Model(),
    ]
    assert load("demo", "teacher.ensemble=null").teacher.ensemble == []


@pytest.mark.parametrize(
    ("override", "value"),
    [("1e-5", 1e-5), ("3", 3.0), (".5", 0.5), ("5E-4", 5e-4)],
)
def test_numbers_are_read_as_people_write_them(override, value):
    job = load("demo", f"teacher.optimizer.learning_rate={override}")
    assert job.teacher.optimizer.learning_rate == value


def test_a_value_may_hold_an_equals_sign_and_be_empty():
    assert load("demo", "note=a=b").note == "a=b"
    assert load("demo", "note='a'", "note=").note is None


@pytest.mark.parametrize("override", ["steps", "=5", ".steps=5", "teacher..layers=1", "a.=1", ""])
def test_what_is_not_an_override_is_said_to_be_none(override):
    assert message("demo", override) == f"{override!r} is not an override; write key=value"


def test_an_override_that_is_not_yaml():
    assert message("demo", "steps=[1").startswith("'steps=[1': not valid YAML: ")


# Mistakes


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
        ("teacher.layers[0]=1", "teacher.layers[0]: unknown key; did you mean layers?"),
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
        ("steps=many", "steps: must be a whole number, not many"),
        ("steps=2.5", "steps: must be a whole number, not 2.5"),
        ("steps=true", "steps: must be a whole number, not true"),
        ("steps='5'", "steps: must be a whole number, not '5'"),
        ("steps=10000000000000000000", "steps: 10000000000000000000 does not fit into 64 bits"),
        ("steps=" + "9" * 5000, "steps: must be a whole number, not 999"),
        ("steps=???", "steps: must be set; ??? is a placeholder"),
        ("steps=!!int abc", "not valid YAML: could not determine a constructor for the tag"),
        ("steps=${", "steps: must be a whole number, not ${"),
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
        ('note="\\ud800"', "note: has a control character: '\\ud800'"),
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
        ("a: [1\n", "not valid YAML"),
        ("a: 1\n a: 2\n", "not valid YAML"),
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
    assert "cannot be read" in message(str(tmp_path / "binary.yaml"))
    assert message(str(tmp_path / "here")).endswith("here: is a folder; name a YAML file in it")
    assert message("configs/job").startswith("configs/job: is a folder")
    assert message("dmo") == "dmo: no such job config; did you mean demo?"
    assert message("configs/job/dmo.yaml") == (
        "configs/job/dmo.yaml: no such file; did you mean demo.yaml?"
    )
    assert message("nowhere/dmo.yaml") == "nowhere/dmo.yaml: no such file"


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


@pytest.mark.parametrize(
    ("written", "read"),
    [("007", "007"), ("1e3", "1e3"), ("24:00:00", "24:00:00"), ("no", "no"), ("2024-01-01",) * 2],
)
def test_a_text_stays_as_it_was_written(written, read):
    assert load("demo", f"note={written}").note == read


def test_aliases_that_grow_are_refused():
    write("a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in pairwise("abcdefg")
    ))  # fmt: skip
    assert "more than 100,000 values" in message("mine.yaml")


def test_a_yaml_merge_key_merges():
    write("base: demo\nnote: x\nstudents:\n  a: &a {layers: [1]}\n  b: {<<: *a, layers: [2]}\n")
    students = load("mine.yaml").students
    assert (students["a"].layers, students["b"].layers) == ([1], [2])


# Round trip

text = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=20)
finite = st.floats(allow_nan=False, allow_infinity=False)
models = st.builds(
    Model,
    layers=st.integers(1, 10**12),
    dropout=finite,
    kind=st.one_of(text, st.sampled_from(["1e-4", "true", "null", "007", "~", "1_0", "no"])),
)
learners = st.builds(
    Learner,
    model=models,
    optimizer=st.builds(
        Optimizer,
        finite,
        st.lists(finite, max_size=3),
        st.booleans(),
    ),
    layers=st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    swap=st.none() | models,
    ensemble=st.lists(models, max_size=2),
)
names = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
jobs = st.builds(
    Job,
    text,
    st.integers(1, 10**9),
    learners,
    st.dictionaries(names, learners, max_size=2),
    st.none() | text,
)


@settings(max_examples=30)
@given(jobs)
def test_what_dump_writes_load_reads_back(tmp_path_factory, job):
    path = tmp_path_factory.mktemp("dumped") / "config.yaml"
    path.write_text(configs.dump(job), encoding="utf-8")
    assert asdict(configs.load(str(path), Job, "job")) == asdict(job)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}\n"])
def test_a_file_that_says_nothing_is_refused(text, tmp_path):
    (tmp_path / "empty.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"empty\.yaml: is empty"):
        configs.load(str(tmp_path / "empty.yaml"), DeviceConfig, "device")
