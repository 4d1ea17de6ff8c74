"""`tandem model` and `tandem import` through the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import configs
import model
import tandem
from commands.job_configs import load_job

SMALL = model.EncoderConfig(vocab_size=50, hidden_size=16, layers=2, heads=2, ffn_size=24)


def tandem_command(*arguments: str) -> Result:
    return CliRunner().invoke(tandem.main, list(arguments))


def test_tandem_model_describes_one_model() -> None:
    for name in ("bert_base", "configs/model/bert_base.yaml"):
        found = json.loads(tandem_command("model", name, "--json").stdout)
        assert found["parameters"] == 109_482_240
        assert found["head_parameters"] == 768 * 768 + 3 * 768 + 30522
        assert found["bytes"] == 4 * (found["parameters"] + found["head_parameters"])
        assert found["flops_per_token"] > 0
    assert "109,482,240 parameters" in tandem_command("model", "bert_base").stdout


def test_every_model_of_a_job() -> None:
    found = json.loads(tandem_command("model", "configs/job/demo.yaml", "--json").stdout)
    assert list(found) == ["teacher", "distilbert", "tinybert"]
    assert found["teacher"]["parameters"] > found["distilbert"]["parameters"]
    assert found["teacher"]["sequence_length"] == 128
    teacher = configs.load("demo_teacher", model.EncoderConfig, "model", ["vocab_size=8192"])
    masked = load_job("demo", ()).data.masking.rate
    flops = model.describe(teacher, 128, masked).flops_per_token
    assert (masked, found["teacher"]["flops_per_token"]) == (0.3, flops)


def test_a_job_is_counted_at_its_longest_phase() -> None:
    found = json.loads(tandem_command("model", "configs/job/bert.yaml", "--json").stdout)
    assert found["sequence_length"] == 512


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("hidden_sise: 3", "hidden_sise: unknown key; did you mean hidden_size?"),
        ("heads: 5", "heads: 5 does not divide the width 768"),
        ("heads: many", "heads: "),
    ],
)
def test_mistakes_are_one_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    result = tandem_command("model", str(path))
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["model"], ["data", "show"]])
def test_a_job_that_cannot_be_read_is_refused_as_a_job(command: list[str], tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(f"base: demo\nname: mine\nsteps: {2**64}\n")
    result = tandem_command(*command, str(config))
    assert result.exit_code == 1
    assert result.stderr == f"tandem: {config}: steps: {2**64} does not fit into 64 bits\n"


def test_an_unknown_name() -> None:
    result = tandem_command("model", "bert_bass")
    assert result.exit_code == 1
    assert "did you mean bert_base?" in result.stderr


def test_an_imported_folder_becomes_a_model_of_a_job(tmp_path: Path) -> None:
    model.save_pretrained(model.build(SMALL, seed=3), tmp_path / "theirs")
    out = tmp_path / "out"
    result = tandem_command("import", str(tmp_path / "theirs"), "--out", str(out))
    assert result.exit_code == 0, result.output
    config = configs.load(str(out / "model.yaml"), model.EncoderConfig, "model")
    assert config == SMALL
    expected = model.build(SMALL, seed=3).state_dict()
    imported = model.from_pretrained(out).state_dict()
    assert all(torch.equal(imported[name], expected[name]) for name in expected)


def test_importing_something_else_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = tandem_command("import", str(tmp_path), "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"tandem: {tmp_path}: has neither")
