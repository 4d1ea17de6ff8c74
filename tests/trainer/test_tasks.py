"""Tasks are found automatically: those of the package, and those in files that a job names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import configs
from configs import ConfigError
from trainer.config import JobConfig
from trainer.learners.module import build_objective
from trainer.objectives import ObjectiveConfig, term
from trainer.objectives.objective_config import declare_terms

JOB = """
name: a
steps: 10
data: {path: corpus}
teacher: {objective: {mlm: {}, %s: {}}}
plugins: [%s]
"""
PLUGIN = '''
from dataclasses import dataclass

from data_pipeline import MASKED
from trainer.objectives.row_losses import cross_entropy_rows
from trainer.objectives.vocabulary import VocabularyTerm
from trainer.objectives.term import register
from trainer.objectives.terms.predictions import VocabularyTermConfig


@register("NAME")
@dataclass
class Twice(VocabularyTermConfig):
    """Masked words, once more."""

    @property
    def source(self):
        return None

    def build(self, student, teacher):
        return TwiceTerm(self)


class TwiceTerm(VocabularyTerm):
    denominator = MASKED

    def row_loss(self, inputs):
        return cross_entropy_rows(inputs.batch.targets[MASKED].labels)
'''


@pytest.fixture(autouse=True)
def forgotten(monkeypatch) -> Iterator[None]:
    """Unregister after the test whatever it has registered."""
    monkeypatch.setattr(term, "_REGISTERED", dict(term._REGISTERED))
    modules = set(sys.modules)
    yield
    monkeypatch.undo()
    declare_terms()
    for name in set(sys.modules) - modules:
        if name.startswith("tandem_plugin_"):
            del sys.modules[name]


def loaded(folder: Path, name: str, plugin: str) -> JobConfig:
    (folder / "job.yaml").write_text(JOB % (name, plugin))
    return configs.load(str(folder / "job.yaml"), JobConfig, "job")


def test_a_users_file_adds_a_key_to_every_objective(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(PLUGIN.replace("NAME", "twice"))
    with pytest.raises(ConfigError, match=r"teacher\.objective\.twice: unknown key"):
        loaded(tmp_path, "twice", "")
    job = loaded(tmp_path, "twice", ", ".join([str(tmp_path / "twice.py")] * 2))
    assert list(job.teacher.objective.terms()) == ["mlm", "twice"]
    objective = build_objective(job.teacher, job.teacher.model, 0)
    assert list(objective.terms) == ["mlm", "twice"]
    again = configs.load_text(configs.dump(job), JobConfig, "job", [], "config.yaml")
    assert again == job


def test_the_config_of_a_run_names_its_plugin_in_any_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "there.py").write_text(PLUGIN.replace("NAME", "there"))
    monkeypatch.chdir(tmp_path)
    job = loaded(tmp_path, "there", "there.py")
    del sys.modules["tandem_plugin_there"]
    monkeypatch.setattr(term, "_REGISTERED", {**term._REGISTERED})
    del term._REGISTERED["there"]
    monkeypatch.chdir("/")
    again = configs.load_text(configs.dump(job), JobConfig, "job", [], "config.yaml")
    assert again.plugins == job.plugins == [str(tmp_path / "there.py")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "wrong.py: no such file"),
        ("def f(:", "wrong.py: SyntaxError: "),
        ("import nothing_of_the_kind", "wrong.py:1: ModuleNotFoundError: "),
        ("import sys; sys.exit(3)", "wrong.py:1: SystemExit: 3"),
    ],
)
def test_what_is_wrong_with_a_plugin_is_one_line(tmp_path, text, message) -> None:
    if text is not None:
        (tmp_path / "wrong.py").write_text(text)
    with pytest.raises(ConfigError, match="plugins: ") as refused:
        loaded(tmp_path, "mlm2", str(tmp_path / "wrong.py"))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_terms_are_summed_in_one_order_whoever_registers_first() -> None:
    assert [*ObjectiveConfig.__dataclass_fields__][:26] == [
        "mlm", "nsp", "sop", "rtd", "soft_kl", "soft_cross_entropy", "blended", "reverse_kl",
        "jensen_shannon", "decoupled_kd", "alpha_beta", "uld", "cosine", "embedding",
        "hidden_mse", "attention_mse", "pkd", "feature_maps", "attention_transfer",
        "mean_transfer", "variance_transfer", "attention_relation", "value_relation",
        "query_relation", "key_relation", "from_student",
    ]  # fmt: skip
