"""Every YAML that is shipped or shown in the documentation fits its schema."""

import dataclasses
import re
from functools import reduce
from pathlib import Path

import pytest
import yaml

import configs
from commands.reference import kinds
from trainer.config import JobConfig
from trainer.objectives.term import registered_terms

ROOT = Path(__file__).parents[2]
SCHEMAS = {**kinds(), "task": JobConfig}
# What the file of a task leaves to its user.
GAPS = {
    "task": ("data.train=train.tsv", "data.validation=dev.tsv", "teacher.init.pretrained=model")
}
JOB_GAPS = {
    "continue": ["teacher.init.pretrained=model"],
    "modernbert_large": ["teacher.init.tile=base"],
}
STUDENT_GAPS = {
    "tinybert": ["students.tinybert.init.pretrained=student"],
    "pkd": [f"students.{form}.init.pretrained=bert" for form in ("skip", "last")],
}
TEACHERS_AND_STUDENT = (
    "teacher.init.pretrained=first",
    "teachers.second.init.pretrained=second",
    "students.mt_dnn.init.pretrained=student",
)
GAPS_OF_SEVERAL = ("tasks.sst2=sst2", "teacher.init.pretrained=model")
FILES = sorted((ROOT / "configs").glob("*/*.yaml"))
EXAMPLES = [
    (page.name, text)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for text in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    if text.startswith("name:")
]


def gaps(kind, name):
    """What has to be given for a shipped file to load."""
    if (kind, name) in (("task", "multi_task"), ("task", "mt_dnn")):
        return [*GAPS_OF_SEVERAL]
    if kind == "job":
        return JOB_GAPS.get(name, [])
    if name == "mt_dnn_kd":
        return [*TEACHERS_AND_STUDENT]
    student_gaps = STUDENT_GAPS.get(name.partition("_")[0], []) if kind == "task" else []
    return [*GAPS.get(kind, ()), *student_gaps]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_file_loads_by_its_name_and_survives_a_round_trip(path, tmp_path):
    kind = path.parent.name
    config = configs.load(path.stem, SCHEMAS[kind], kind, gaps(kind, path.stem))
    written = tmp_path / "written.yaml"
    written.write_text(configs.dump(config), encoding="utf-8")
    assert configs.load(str(written), SCHEMAS[kind], kind) == config


@pytest.mark.parametrize("name", [path.stem for path in FILES if path.parent.name == "task"])
def test_a_run_of_a_task_is_scored_ten_times(name):
    """A run of 319 steps had no score before its end."""
    job = configs.load(name, JobConfig, "task", gaps("task", name))
    assert job.evaluation.every_in(319) == 31


@pytest.mark.parametrize(("page", "text"), EXAMPLES)
def test_an_example_job_in_the_documentation_loads(page, text, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    assert configs.load(str(path), JobConfig, "job").students, page


OBJECTIVES = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")


def test_every_term_has_a_line_in_the_guide():
    lines = re.findall(r"^\| (`[^|]+`) \|", OBJECTIVES, re.M)
    stated = {name for line in lines for name in re.findall(r"`(\w+)`", line)}
    assert set(registered_terms()) <= stated


# A table of docs/objectives.md for each job that repeats an original: (job, key, ours).
OWN = {"bert_large_cluster", "demo", "everything", "small"}
STATED = [
    (job, key, ours)
    for job, section in re.findall(r"^### `(\w+)`\n(.*?)(?=^### |\Z)", OBJECTIVES, re.S | re.M)
    for key, ours in re.findall(r"^\| `(\S+)` \|.*?\| `([^`]+)` \| [^|]+ \|$", section, re.M)
]


def at(config, key):
    """The value of a dotted key; numbers are indices of a list."""
    plain = dataclasses.asdict(config)
    return reduce(
        lambda tree, part: tree[int(part) if part.isdigit() else part], key.split("."), plain
    )


NAMED = {path.stem: "job" for path in FILES if path.parent.name == "job" and path.stem not in OWN}


@pytest.mark.parametrize(
    ("job", "kind"),
    [
        *NAMED.items(),
        *(
            (task, "task")
            for task in (
                "tinybert_task",
                "pkd_task",
                "fastbert",
                "tang_task",
                "mt_dnn",
                "c_mlm_student",
            )
        ),
    ],
)
def test_the_table_of_a_named_job_is_true(job, kind):
    config = configs.load(job, JobConfig, kind, gaps(kind, job))
    lines = [(key, ours) for name, key, ours in STATED if name == job]
    assert len(lines) > 10
    for key, ours in lines:
        assert at(config, key) == yaml.safe_load(ours), key
