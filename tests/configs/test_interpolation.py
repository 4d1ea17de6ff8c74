"""Interpolations, variables in paths, and OmegaConf's grammar of overrides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

import configs
from cluster.config import ClusterConfig
from configs import ConfigError
from configs.rules import PATH, VERBATIM
from tests.configs.example_job import Job, Model, load, message, write
from trainer.config import JobConfig

pytestmark = pytest.mark.usefixtures("shipped")


@dataclass
class Files:
    root: Annotated[str, PATH] = ""
    cache: Annotated[str | None, PATH] = None
    others: Annotated[dict[str, str], PATH] = field(default_factory=dict)
    lists: list[Annotated[str, PATH]] = field(default_factory=list)
    text: str = ""
    lines: Annotated[list[str], VERBATIM] = field(default_factory=list)
    job: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outer:
    job: Job


def files(text: str, *overrides: str) -> Files:
    return configs.load_text(text, Files, "files", overrides, "a file")


@pytest.mark.parametrize(
    ("override", "layers"),
    [
        ("students.half.model.layers=${teacher.model.layers}", 4),
        ("students.half.model.layers=${oc.env:LAYERS}", 7),
        ("students.half.model.layers=${oc.env:NO_SUCH_VARIABLE,9}", 9),
        ("students.half.model={layers: '${oc.decode:${oc.env:LAYERS}}'}", 7),
        ("students.half.model=${teacher.model}", 4),
        ("students.half.model.layers=${..ensemble[1].layers}", 6),
        ("students.half.model=${oc.env:MODEL}", 24),
    ],
)
def test_a_value_may_be_that_of_another_key_or_of_the_environment(override, layers, monkeypatch):
    monkeypatch.setenv("LAYERS", "7")
    monkeypatch.setenv("MODEL", "large")
    job = load("demo", "students.half.ensemble=[{}, {layers: 6}]", override)
    assert job.students["half"].model.layers == layers


def test_a_key_that_no_file_sets_has_its_default_in_an_interpolation():
    assert load("demo", "steps=${teacher.swap.layers}", "teacher.swap={}").steps == 2
    assert load("demo", "note=${teacher.model.kind}-${name}").note == "bert-demo"
    assert "steps: Interpolation key 'teacher.nothing' not found" in message(
        "demo", "steps=${teacher.nothing}"
    )


def test_a_text_is_read_through_an_interpolation_as_it_was_written():
    job = load("demo", "name=007", "note=${name}", "steps=${name}")
    assert (job.note, job.steps) == ("007", 7)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("steps=${no.such}", "Interpolation key 'no.such' not found"),
        ("steps=${oc.env:NO_SUCH_VARIABLE}", "Environment variable 'NO_SUCH_VARIABLE' not found"),
        ("steps=${no_such_resolver:1}", "Unsupported interpolation type no_such_resolver"),
        ("steps=${steps}", "Recursive interpolation"),
        ("steps=${name}", "must be a whole number, not demo"),
        ("steps=${teacher}", "must be a whole number, not {"),
        ("steps=a ${", "no viable alternative at input"),
    ],
)
def test_an_interpolation_that_comes_to_nothing_is_one_line(override, why):
    assert f"demo.yaml: steps: {why}" in message("demo", override)


def test_paths_have_variables_and_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("HOME", "/home/me")
    read = files("root: $SCRATCH/x\ncache: ~/x\nothers: {a: '${oc.env:SCRATCH}/y'}\nlists: [~/z]\n")
    assert (read.root, read.cache) == ("/scratch/me/x", "/home/me/x")
    assert (read.others, read.lists) == ({"a": "/scratch/me/y"}, ["/home/me/z"])
    assert files("text: $SCRATCH/~\n").text == "$SCRATCH/~"
    monkeypatch.setenv("HERE", str(tmp_path))
    (tmp_path / "model.yaml").write_text("layers: 9\n")
    assert load("demo", "teacher.model=$HERE/model.yaml").teacher.model == Model(layers=9)


def test_a_variable_that_is_not_set_is_named():
    with pytest.raises(ConfigError, match=r"^a file: others\.a: \$NONE_SUCH/x: \$NONE_SUCH is not"):
        files("others: {a: $NONE_SUCH/x}\n")
    write("", "a$NONE_SUCH")
    assert files("root: a$NONE_SUCH\n").root == "a$NONE_SUCH"
    assert files("root: 'gs://bucket/a$b'\n").root == "gs://bucket/a$b"


def test_an_absolute_path_with_a_dollar_in_it_is_found_though_a_variable_is_called_so(tmp_path):
    file = tmp_path / "$HOME x" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(f"root: {file}\n")
    assert configs.find(str(file), "job") == file
    assert files(f"root: {file}\n").root == str(file)


def test_shell_lines_and_sections_for_another_schema_keep_their_interpolations():
    read = files("lines: ['echo ${x:-y} $HOME']\njob: {data: {path: '${data.root}'}}\n")
    assert read.lines == ["echo ${x:-y} $HOME"]
    assert read.job == {"data": {"path": "${data.root}"}}
    assert files(configs.dump(read)) == read
    cluster = configs.load_text("before: ['${A}']\n", ClusterConfig, "cluster", [], "x")
    assert cluster.before == ["${A}"]


@pytest.mark.parametrize(
    "written", [r"\${x}", r"a \${x} \\\${y}", "$x", r"\\n ${oc.env:HOME}\\", r"\a b\${ c\\${name}"]
)
def test_an_interpolation_in_a_dumped_text_is_no_interpolation(written):
    read = files("", f"text={written.replace('name', 'root')}")
    assert files(configs.dump(read)) == read


def test_every_path_of_a_job_is_expanded(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch")
    text = """
name: x
steps: 1
data: {mixture: {a: {path: $SCRATCH/a}}, cache_dir: $SCRATCH/b, stage: $TMPDIR}
teacher: {init: {pretrained: $SCRATCH/c}, objective: {mlm: {}}}
output_dir: $SCRATCH/runs
"""
    job = configs.load_text(text, JobConfig, "job", [], "x")
    assert job.data.mixture["a"].path == "/scratch/a"
    assert (job.data.cache_dir, job.data.stage) == ("/scratch/b", "$TMPDIR")
    assert (job.teacher.init.pretrained, job.output_dir) == ("/scratch/c", "/scratch/runs")


# Overrides


def test_an_override_may_have_brackets_and_the_index_of_a_list():
    assert load("demo", "students[tiny].model[layers]=3").students["tiny"].model.layers == 3
    given = ["teacher.optimizer.betas=[0.1, 0.2]", "teacher.optimizer.betas[1]=0.5"]
    assert load("demo", *given).teacher.optimizer.betas == [0.1, 0.5]
    given = ["teacher.ensemble=[{layers: 3}, {}]", "teacher.ensemble[1].layers=8"]
    assert load("demo", *given).teacher.ensemble == [Model(layers=3), Model(layers=8)]


def test_an_override_of_base_keeps_what_is_beside_it():
    write("base: demo\nteacher: {model: {base: small, layers: 6}}\n")
    assert load("mine.yaml").teacher.model == Model(layers=6, dropout=0.2)
    assert load("mine.yaml", "teacher.model.base=large").teacher.model == Model(layers=6)
    kept = load("mine.yaml", "teacher.model.dropout=0.3", "teacher.model.base=large")
    assert kept.teacher.model == Model(layers=6, dropout=0.3)
    assert load("demo", "teacher.model.base=large").teacher.model == Model(layers=24)
    for replaced in ("teacher.model=large", "teacher.model={base: large}"):
        assert load("mine.yaml", replaced).teacher.model == Model(layers=24)
        again = load("mine.yaml", replaced, "teacher.model.base=small").teacher.model
        assert again == Model(layers=4, dropout=0.2)


def test_a_removed_entry_may_be_given_anew():
    write(
        "students: {a: {layers: [2]}, b: {layers: [2]}}\nname: x\nsteps: 1\nteacher: {}\n", "o.yaml"
    )
    write("base: o.yaml\nstudents: {c: {}}\n")
    assert [*load("mine.yaml", "students.b=null").students] == ["a", "c"]
    again = load("mine.yaml", "students.b=null", "students.b.swap={}")
    assert again.students["b"].layers is None


def test_an_entry_is_removed_from_a_section_whose_own_file_has_it():
    write("job: {base: demo, steps: 3}\n")
    loaded = configs.load("mine.yaml", Outer, "job", ["job.students.tiny=null"])
    assert ([*loaded.job.students], loaded.job.steps) == (["half"], 3)
