"""Damage to every file of a corpus, a run, a checkpoint and a model: no command is misled.

A command that is given a damaged file either reports it, or does exactly what it does with the
intact one. A result that silently differs is a fault, and so is a traceback.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_JOB, tandem
from tests.damage import Damage, damages
from tests.forked_commands import Case, Ended, run

OF_EACH_KIND = 240
# One rank of a job that some launcher has started: training, in the process that is asked for it.
A_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
          "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip
# In what two runs of one command differ: times and speeds, and where they wrote.
PASSING = re.compile(
    r"time|second|wait|stall|slowest|speed|mfu|memory|sequences?_per|tokens_per|age$|path|log$"
    r"|export"
)
# What is not a result, or says when it was made.
RECORDS = {"attempts", "report.html", "README.md", "origin.json", "evaluation.json",
           "checkpoints", "config.yaml"}  # fmt: skip

# A config is for people to edit, and models of Hugging Face have no checksums: a flipped bit of
# these may be seen, in a number or a name it cannot be.
WITHOUT_CHECKSUM = (
    "config.yaml", "model.yaml", "config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json", "evaluation.json", "000001.json",
)  # fmt: skip
# What may as well never have been there; sequence counts are computed again when they are needed.
OPTIONAL = ("tokenizer_config.json", "sequences-*.npy")


@dataclass(frozen=True)
class Command:
    """The words after ``tandem``; {folder} is the damaged folder, {out} an empty output folder."""

    words: str
    trains: bool = False

    @property
    def writes_beside(self) -> bool:
        """Whether it writes to {out}, not into the damaged folder itself."""
        return not self.trains or "{out}" in self.words

    def case(self, folder: Path, out: Path, corpus: Path) -> Case:
        """The command for these folders."""
        names = {"folder": folder, "out": out, "job": TINY_JOB, "corpus": corpus}
        return Case(
            [word.format(**names) for word in self.words.split()], A_RANK if self.trains else {}
        )


COMMANDS = {
    "corpus": [
        Command("data check {folder}"),
        Command("data show {job} data.path={folder}"),
        Command("data dump {job} data.path={folder} --steps 0:9 --out {out}/rows.npz"),
        Command("train {job} data.path={folder} output_dir={out} steps=2", trains=True),
    ],
    "run": [
        Command("status {folder} --json"),
        Command("export {folder} --learner tinybert --out {out}/exported"),
        Command("evaluate {folder} --learner tinybert --json"),
        Command("fork {folder} --step 8 --name forked output_dir={out}"),
        Command("train {folder}/config.yaml output_dir={folder}/.. steps=10", trains=True),
        Command("train {job} data.path={corpus} output_dir={folder}/.. steps=10", trains=True),
        Command("sync {folder}"),
        Command("stop {folder} --wait 0.1"),
    ],
    "model": [
        Command("import {folder} --out {out}/imported"),
        Command("model {folder}/model.yaml --json"),
    ],
}


@dataclass(frozen=True)
class Trial:
    """One damaged file, and what a command did about it."""

    file: str
    damage: Damage
    command: Command
    ended: Ended
    result: dict[str, Any]

    def __str__(self) -> str:
        said = (self.ended.errors or self.ended.output)[-300:]
        return f"{self.file}, {self.damage.name}: {self.command.words}: {self.ended.code} {said!r}"

    @property
    def may_be_so(self) -> bool:
        """Whether the file is optional, and now missing or empty."""
        name = Path(self.file).name
        is_optional = any(fnmatch(name, pattern) for pattern in OPTIONAL)
        return is_optional and self.damage.name in ("missing", "JSON: {}")

    @property
    def cannot_be_told(self) -> bool:
        """Whether the file has no checksum, and its new content may be intended."""
        flipped = "flipped" in self.damage.name and Path(self.file).name in WITHOUT_CHECKSUM
        return self.may_be_so or flipped

    def is_noticed(self, whole: dict[str, Any]) -> bool:
        """Whether it failed, naming the file or checkpoint, or gave the intact files' result."""
        said = self.ended.errors + self.ended.output
        names = [Path(self.file).name, *re.findall(r"step-\d+", self.file)]
        return self.ended.code != 0 or any(name in said for name in names) or self.result == whole


@dataclass(frozen=True)
class Trials:
    """Commands on fresh copies of a folder in which one file is damaged."""

    original: Path
    corpus: Path
    place: Path

    def one(self, command: Command, damage: Damage | None = None, file: str = "") -> Trial:
        """Run one command; one that only reads must leave every other file unchanged."""
        shutil.rmtree(self.place, ignore_errors=True)
        folder, out = self.place / self.original.name, self.place / "out"
        shutil.copytree(self.original, folder)
        out.mkdir()
        if damage is not None:
            damage.inflict(folder / file)
        before = contents(folder)
        ended = run(command.case(folder, out, self.corpus))
        if not command.trains:
            before.pop(file, None)
            lost = before.items() - contents(folder).items()
            assert not lost, (file, damage, command.words, lost)
        made = out if command.writes_beside else folder
        found = result(made, "" if command.trains else ended.output)
        return Trial(file, damage or Damage("whole"), command, ended, found)

    def sample(self, commands: list[Command], size: int) -> Iterator[Trial]:
        """Some kinds of damage to all files, each with one of the commands in turn."""
        files = sorted(path for path in self.original.rglob("*") if path.is_file())
        harms = [(path, one) for path in files for one in damages(path.read_bytes(), flips=2)]
        chosen = random.Random(len(harms)).sample(harms, min(size, len(harms)))
        for number, (path, damage) in enumerate(chosen):
            command = commands[number % len(commands)]
            yield self.one(command, damage, str(path.relative_to(self.original)))


def contents(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not {"requests", "wandb", "logs"}.intersection(path.parts)
    }


def result(folder: Path, output: str) -> dict[str, Any]:
    """What a command printed and wrote, without what differs between any two runs."""
    try:
        found: dict[str, Any] = {"printed": lasting(json.loads(output))}
    except ValueError:
        found = {"printed": re.sub(r"\S*/\S*", "", output)}
    for name, digest in contents(folder).items():
        if RECORDS.isdisjoint(Path(name).parts):
            found[name] = digest
            if name.endswith("metrics.jsonl"):
                lines = (folder / name).read_text(errors="replace").splitlines()
                found[name] = [lasting(row(line)) for line in lines]
    return found


def row(line: str) -> Any:
    """What a line of JSON says, or the line where it is damaged: a run goes on behind it."""
    try:
        return json.loads(line)
    except ValueError:
        return line


def lasting(tree: Any) -> Any:
    """A JSON tree without what differs every time it is made."""
    if isinstance(tree, dict):
        return {key: lasting(one) for key, one in tree.items() if not PASSING.search(key)}
    return [lasting(one) for one in tree] if isinstance(tree, list) else tree


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the tiny job on one rank, which another attempt may resume."""
    runs = tmp_path_factory.mktemp("trained")
    done = tandem("train", TINY_JOB, f"data.path={corpus}", f"output_dir={runs}", "--nproc", 1)
    assert done.returncode == 0, done.stderr
    for name in ("report.html", "logs/rank-000.log"):
        (runs / "tiny" / name).unlink()
    shutil.move(runs / "tiny" / "exports" / "tinybert", runs / "model")
    shutil.rmtree(runs / "tiny" / "exports")
    return runs / "tiny"


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMMANDS)
def test_damage_is_said_or_repaired(kind: str, corpus: Path, trained: Path, tmp_path: Path) -> None:
    folders = {"corpus": corpus, "run": trained, "model": trained.with_name("model")}
    trials = Trials(folders[kind], corpus, tmp_path / "trial")
    whole = {command: trials.one(command) for command in COMMANDS[kind]}
    assert [str(one) for one in whole.values() if one.ended.fault] == []
    tried = list(trials.sample(COMMANDS[kind], OF_EACH_KIND))
    assert [f"{one.ended.fault}: {one}" for one in tried if one.ended.fault] == []
    silent = [
        one
        for one in tried
        if not one.is_noticed(whole[one.command].result) and not one.cannot_be_told
    ]
    assert list(map(str, silent)) == []
    if kind == "corpus":  # every byte of it has a checksum
        harmed = [one for one in tried if not one.may_be_so]
        checks = [one for one in harmed if one.command.words == "data check {folder}"]
        assert [str(one) for one in checks if one.ended.code != 1] == []
