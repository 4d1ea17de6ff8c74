"""What a YAML file comes to: bases, sections by name, overrides; and back."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import configs
from tests.configs.example_job import Anything, Job, Learner, Model, Optimizer, load, message, write

pytestmark = pytest.mark.usefixtures("shipped")


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


def test_a_job_begins_with_a_task_by_name_and_a_task_with_a_job(shipped):
    (shipped / "task").mkdir()
    (shipped / "task/pair.yaml").write_text("name: pair\nsteps: 3\nteacher: {}\n")
    (shipped / "task/mrpc.yaml").write_text("base: pair\nnote: x\n")
    assert load("configs/task/mrpc.yaml") == Job("pair", 3, Learner(), note="x")
    assert load(write("base: configs/task/mrpc.yaml\nsteps: 4\n")).steps == 4
    assert load(write("base: mrpc\nsteps: 5\n")).note == "x"  # a copy of a shipped task, say
    assert configs.load(write("base: demo\n"), Job, "task").name == "demo"
    assert "base: pairs: no such job config" in message(write("base: pairs\n"))


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


def test_null_removes_an_entry_of_a_map():
    assert [*load("demo", "students.tiny=null").students] == ["half"]
    assert [*load("long", "students.half=null", "students.tiny=null").students] == []
    assert [*load(write("base: demo\nstudents: {tiny: null}\n")).students] == ["half"]
    assert "students.tinny: there is no such entry to remove; there are: tiny, half" in message(
        "demo", "students.tinny=null"
    )


def test_values_by_step_replace_those_below_and_a_key_changes_one_of_them():
    stages = write("base: demo\nteacher: {weight: {0: 1.0, 90: 0.5}}\n", "stages.yaml")
    again = write(f"base: {stages}\nteacher: {{weight: {{40: 0.2}}}}\n")
    assert load(again).teacher.weight == {40: 0.2}
    assert load(stages, "teacher.weight={40: 0.2}").teacher.weight == {40: 0.2}
    assert load(stages, "teacher={weight: {40: 0.2}}").teacher.weight == {40: 0.2}
    assert load(stages, "teacher.weight.90=0.2").teacher.weight == {0: 1.0, 90: 0.2}
    assert load("demo", "teacher.weight.90=0.2").teacher.weight == {90: 0.2}


def test_an_override_changes_one_item_in_a_section_that_a_file_gives():
    write("ensemble: [{layers: 3}, {layers: 4}]\nweight: {0: 1.0, 90: 0.5}\n", "learner.yaml")
    job = write("base: demo\nteacher: ./learner.yaml\n")
    changed = load(job, "teacher.ensemble[1].layers=5", "teacher.weight.90=0.2").teacher
    assert changed.ensemble == [Model(layers=3), Model(layers=5)]
    assert changed.weight == {0: 1.0, 90: 0.2}
    assert "teacher.ensemble[2]: there are only 2" in message(job, "teacher.ensemble[2].layers=5")
    assert "teacher.ensemble: not set" in message("demo", "teacher.ensemble[0].layers=5")


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
    job = load("demo", f" teacher.optimizer.learning_rate ={override}")
    assert job.teacher.optimizer.learning_rate == value


def test_a_value_may_hold_an_equals_sign_and_be_empty():
    assert load("demo", "note=a=b").note == "a=b"
    assert load("demo", "note='a'", "note=").note is None


@pytest.mark.parametrize(
    ("written", "read"),
    [("007", "007"), ("1e3", "1e3"), ("24:00:00", "24:00:00"), ("no", "no"), ("2024-01-01",) * 2],
)
def test_a_text_stays_as_it_was_written(written, read):
    assert load("demo", f"note={written}").note == read


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
