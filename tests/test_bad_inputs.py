"""Hundreds of bad inputs: none ends in a traceback, none is accepted, none destroys data."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import configs
from cluster.config import ClusterConfig
from configs.devices import DeviceConfig
from configs.yaml_text import parse
from model import EncoderConfig, ModelError, build, from_pretrained, save_pretrained
from tests.bad_values import BadValue, bad_values, keys
from tests.conftest import TINY_JOB
from tests.damage import damages, harmed
from tests.forked_commands import Case, run
from trainer.config import JobConfig

QUICK = 150  # of each schema's
OF_JOBS, OF_OTHERS = 3800, 150
THROUGH_THE_COMMAND_LINE = 4000
PARTS = 20  # each of which ends within the time of one test
SCHEMAS: dict[str, Any] = {"job": JobConfig, "cluster": ClusterConfig, "device": DeviceConfig}
NAMES = {"job": str(TINY_JOB), "cluster": "cpu", "device": "h100"}


def wrong_values(kind: str) -> list[BadValue]:
    every = keys(SCHEMAS[kind], named="tinybert")
    return [value for key in every for value in bad_values(key)]


def sample(values: list[Any], size: int) -> list[Any]:
    """A fixed sample in a mixed order."""
    return random.Random(len(values)).sample(values, min(size, len(values)))


@cache
def resolved(kind: str) -> Any:
    overrides = ["data.path=''", "data.mixture={tinybert: {path: corpus}}"] if kind == "job" else []
    config = configs.load(NAMES[kind], SCHEMAS[kind], kind, overrides)
    return parse(configs.dump(config), "the base")


def changed(tree: Any, names: list[str], value: Any) -> dict[str, Any]:
    own = dict(tree) if isinstance(tree, dict) else {}
    inner = changed(own.get(names[0]), names[1:], value) if len(names) > 1 else value
    return {**own, names[0]: inner}


def outcome(read: Callable[[], Any], error: type[Exception]) -> tuple[str, Any]:
    """The message if `read` refuses, and its result if it does not."""
    try:
        return "", read()
    except error as refused:
        return str(refused), None


@pytest.mark.parametrize("kind", SCHEMAS)
def test_no_key_takes_a_wrong_value(kind: str) -> None:
    def read(bad: BadValue) -> Any:
        value = parse(bad.value, f"a file: {bad.key}")
        tree = changed(resolved(kind), bad.key.split("."), value)
        return configs.validate(tree, SCHEMAS[kind], "a file")

    for bad in sample(wrong_values(kind), QUICK):
        message, _ = outcome(partial(read, bad), configs.ConfigError)
        assert message.startswith("a file: "), (bad, message)
        # Of a section that is off, and on by this key alone, the one that it needs may be missing.
        assert bad.key.split(".")[-1] in message or message.endswith("must be set"), (bad, message)
        assert "\n" not in message, (bad, message)


def test_a_damaged_config_is_refused_or_whole(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(configs.dump(configs.load("demo", JobConfig, "job")), encoding="utf-8")
    for damage in damages(path.read_bytes()):
        with harmed(path, damage):
            read = partial(configs.load, str(path), JobConfig, "job")
            message, found = outcome(read, configs.ConfigError)
        assert str(path) in message or isinstance(found, JobConfig), damage.name
        assert "\n" not in message, damage.name


def test_a_damaged_model_folder_is_refused_or_whole(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "heads": 2, "ffn_size": 8, "max_positions": 8}
    config = EncoderConfig(vocab_size=20, layers=1, **sizes)
    save_pretrained(build(config, seed=0), tmp_path)
    for path in (tmp_path / "config.json", tmp_path / "model.safetensors"):
        for damage in damages(path.read_bytes()):
            with harmed(path, damage):
                message, found = outcome(partial(from_pretrained, tmp_path), ModelError)
            is_whole = found is not None and found.config == config
            assert str(tmp_path) in message or is_whole or "flipped" in damage.name, damage.name
            assert "\n" not in message, damage.name


def through_the_command_line(folder: Path) -> list[Case]:
    """Wrong values, each in a command that reads the key of a job, a cluster or a device."""
    job = str(TINY_JOB)
    commands = (["train", job], ["submit", job], ["plan", job], ["data", "show", job])
    cases = [
        Case([*commands[number % len(commands)], bad.override])
        for number, bad in enumerate(sample(wrong_values("job"), OF_JOBS))
    ]
    for kind, words in {
        "cluster": ["submit", job, "--dry-run", "--cluster"],
        "device": ["plan", job, "--device"],
    }.items():
        for number, bad in enumerate(sample(wrong_values(kind), OF_OTHERS)):
            path = folder / f"{kind}-{number}.yaml"
            path.write_text(f"base: {NAMES[kind]}\n{bad.key}: {bad.value}\n")
            cases.append(Case([*words, str(path)]))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_command_takes_a_wrong_value(part: int, tmp_path: Path) -> None:
    accepted, faults = [], []
    cases = through_the_command_line(tmp_path)
    for case in cases[part::PARTS]:
        ended = run(case)
        if ended.fault:
            faults.append((case, ended.fault, ended.errors[-300:]))
        elif ended.code not in (1, 2):
            accepted.append(case)
    assert len(cases) >= THROUGH_THE_COMMAND_LINE
    assert (faults, accepted) == ([], [])
