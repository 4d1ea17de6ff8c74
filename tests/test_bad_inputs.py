"""Bad inputs by the hundred: none ends in a traceback, none is accepted, none costs any data."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
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
from tests.forked_commands import Case, Ended, run_all
from trainer.config import JobConfig

QUICK = 150  # of each schema's
THROUGH_THE_COMMAND_LINE = 4000
OF_FILES = 400
SCHEMAS: dict[str, Any] = {"job": JobConfig, "cluster": ClusterConfig, "device": DeviceConfig}
NAMES = {"job": str(TINY_JOB), "cluster": "cpu", "device": "h100"}


def wrong_values(kind: str) -> list[BadValue]:
    every = keys(SCHEMAS[kind], named="tinybert")
    return [value for key in every for value in bad_values(key)]


def sample(values: list[Any], size: int) -> list[Any]:
    """Always the same, in a mixed order."""
    return random.Random(len(values)).sample(values, min(size, len(values)))


@cache
def resolved(kind: str) -> Any:
    overrides = ["data.path=corpus"] if kind == "job" else []
    config = configs.load(NAMES[kind], SCHEMAS[kind], kind, overrides)
    return parse(configs.dump(config), "the base")


def changed(tree: Any, names: list[str], value: Any) -> dict[str, Any]:
    own = dict(tree) if isinstance(tree, dict) else {}
    inner = changed(own.get(names[0]), names[1:], value) if len(names) > 1 else value
    return {**own, names[0]: inner}


def outcome(read: Callable[[], Any], error: type[Exception]) -> tuple[str, Any]:
    """What `read` says when it refuses, and what it returns when it does not."""
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
        assert bad.key.split(".")[-1] in message, (bad, message)
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


@pytest.mark.slow
def test_no_command_takes_a_wrong_value() -> None:
    """Job keys by every command that reads a job, keys of clusters and devices by theirs."""
    values = sample(wrong_values("job"), THROUGH_THE_COMMAND_LINE)
    commands = (["train"], ["submit"], ["plan"], ["data", "show"])
    cases = [
        Case([*commands[number % len(commands)], str(TINY_JOB), bad.override])
        for number, bad in enumerate(values)
    ]
    accepted, faults = [], []
    for case, ended in zip(cases, run_all(cases), strict=True):
        if ended.fault:
            faults.append((case.argv, ended.fault, ended.errors[-300:]))
        elif ended.code not in (1, 2):
            accepted.append(case.argv)
    assert len(cases) >= THROUGH_THE_COMMAND_LINE
    assert (faults, accepted) == ([], [])


def readers(kind: str, folder: Path, out: Path) -> list[list[str]]:
    """The commands that read a folder of this kind, and change nothing in it."""
    place = str(folder)
    return {
        "corpus": [
            ["data", "check", place],
            ["data", "show", str(TINY_JOB), f"data.path={place}"],
            ["data", "dump", str(TINY_JOB), f"data.path={place}", "--steps", "0:1", "--out",
             str(out / "rows.npz")],
        ],
        "run": [
            ["status", place, "--json"],
            ["export", place, "--learner", "tinybert", "--out", str(out / "exported")],
            ["evaluate", place, "--learner", "tinybert", "--json"],
            ["fork", place, "--step", "8", "--name", "forked", f"runs={out}"],
        ],
        "model": [
            ["import", place, "--out", str(out / "imported")],
            ["model", f"{place}/model.yaml", "--json"],
        ],
    }[kind]  # fmt: skip


def of_damaged_files(
    kind: str, folder: Path, out: Path, size: int
) -> Iterator[tuple[str, list[str], Ended]]:
    """(file and damage, command, how it ended); the folder is otherwise as it was, each time."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    harms = [(path, one) for path in files for one in damages(path.read_bytes(), flips=1)]
    chosen = sample(harms, size)
    commands = readers(kind, folder, out)

    def cases() -> Iterator[Case]:
        for number, (path, damage) in enumerate(chosen):
            before = content(folder, path)
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            with harmed(path, damage):
                yield Case(commands[number % len(commands)])
                lost = before.items() - content(folder, path).items()
                assert not lost, f"{path}: {damage.name}: {lost}"

    for number, ended in enumerate(run_all(cases())):
        path, damage = chosen[number]
        yield f"{path.relative_to(folder)}: {damage.name}", commands[number % len(commands)], ended


def content(folder: Path, harmed_file: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file but one."""
    return {
        name: (os.stat(name).st_size, os.stat(name).st_mtime_ns)
        for name in map(str, folder.rglob("*"))
        if Path(name).is_file() and Path(name) != harmed_file and "requests" not in name
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["corpus", "run", "model"])
def test_no_damaged_file_ends_in_a_traceback(
    kind: str, corpus: Path, finished: tuple[Path, str], tmp_path: Path
) -> None:
    original = {"corpus": corpus, "run": finished[0], "model": finished[0] / "exports" / "tinybert"}
    folder = tmp_path / kind
    shutil.copytree(original[kind], folder)
    faults = [
        (what, " ".join(command), ended.fault, ended.errors[-300:])
        for what, command, ended in of_damaged_files(kind, folder, tmp_path / "out", OF_FILES)
        if ended.fault
    ]
    assert faults == []
