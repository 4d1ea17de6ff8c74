"""Every command in the guides does what the guides say, or the page says why it cannot be run.

The pages are followed in order in one folder, as a reader would, with models and steps shrunk to
what a test can afford. A block of commands after ``<!-- not run: REASON -->`` is only parsed; a
block after ``<!-- in the background -->`` runs beside those that follow.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import tandem as command_line
from tests.conftest import REPOSITORY, command_environment
from tests.waiting import until

DOCS = REPOSITORY / "docs"
PAGES = re.findall(r"\]\((\w+\.md)\)", (DOCS / "README.md").read_text())[:8]
BLOCK = re.compile(
    r"(?:<!-- (?P<remark>[^>]*) -->\n)?```(?P<kind>bash|yaml)\n(?P<text>.*?)^```", re.S | re.M
)
WIDTHS = {"hidden_size": 32, "ffn_size": 64, "heads": 4, "max_positions": 64, "embedding_size": 0}


class Block:
    def __init__(self, page: str, match: re.Match[str]) -> None:
        self.page, self.kind, self.text = page, match["kind"], match["text"]
        self.position = match.start()
        remark = match["remark"] or ""
        self.is_run = not remark.startswith("not run: ")
        self.in_background = remark == "in the background"
        before = (DOCS / page).read_text()[: match.start()]
        named = re.findall(r"`(\w+\.yaml)`", before.rpartition("\n\n")[0].rpartition("\n\n")[2])
        self.file = named[-1] if named else ""

    @property
    def commands(self) -> list[list[str]]:
        return [shlex.split(line, comments=True) for line in self.text.splitlines() if line]


def blocks(page: str) -> list[Block]:
    return [Block(page, match) for match in BLOCK.finditer((DOCS / page).read_text())]


COMMANDS = [
    (page, command)
    for page in PAGES
    for block in blocks(page)
    if block.kind == "bash"
    for command in block.commands
] + [
    (path.name, shlex.split(line, comments=True))  # those of the other pages are parsed only
    for path in [REPOSITORY / "README.md", *sorted(DOCS.glob("*.md"))]
    if path.name not in PAGES
    for text in re.findall(r"^```(?:bash)?\n(.*?)^```", path.read_text(), re.S | re.M)
    for line in text.splitlines()
    if line.startswith("tandem ")
]


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda value: str(value)[:60])
def test_a_command_has_the_options_that_a_page_gives_it(page, command):
    if command[0] != "tandem":
        assert command[0] in ("make", "torchrun")
        return
    group: Any = command_line.main
    arguments = command[1:]
    while isinstance(group, click.Group):
        group = group.commands[arguments[0]]
        arguments = arguments[1:]
    known = {name for one in group.params for name in one.opts}
    free = group.context_settings.get("ignore_unknown_options", False)
    given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    assert free or given <= known, given - known


def options(command: click.Command, name: str) -> Iterator[tuple[str, click.Option]]:
    """(the words that name it, an option) for every option of a command, or of those in a group."""
    if isinstance(command, click.Group):
        for word, inner in command.commands.items():
            yield from options(inner, f"{name} {word}")
    yield from ((name, one) for one in command.params if isinstance(one, click.Option))


def test_every_option_has_a_help_text():
    found = [*options(command_line.main, "tandem")]
    assert len(found) > 60
    assert [(name, *one.opts) for name, one in found if not one.help] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_leads_to_the_next(page):
    text = (DOCS / page).read_text()
    following = PAGES[PAGES.index(page) + 1 :][:1]
    assert not following or f"({following[0]})" in text.splitlines()[-1]
    for block in blocks(page):
        assert block.is_run or block.kind == "bash"


def shrunk(job: dict[str, Any]) -> dict[str, Any]:
    """The same job with narrow models, short sequences and few steps."""
    job = {**job, "steps": 12, "batch": {"size": 32, "micro_batch": 8}}
    job["data"] = {**job["data"], "sequence_length": 32, "phases": []}
    job["evaluation"] = {"every": 4, "sequences": 16}
    job["checkpoint"] = {"every": 4}
    job["log"] = {"every": 1}
    for learner in [job["teacher"], *job["students"].values()]:
        shrink(learner)
    return job


def shrink(learner: dict[str, Any]) -> None:
    model = learner["model"]
    model = {"base": model} if isinstance(model, str) else dict(model)
    learner["model"] = {**model, **WIDTHS, "vocab_size": 600}
    learner.pop("schedule", None)
    if "step" in learner.get("start", {}):
        learner["start"] = {"step": 4}
    if "budget" in learner:
        learner["budget"] = {"steps": 4}


class Walk:
    """A reader with a shell in an empty folder, and some text."""

    def __init__(self, folder: Path, text: Path) -> None:
        self.folder = folder
        (folder / "text").mkdir()
        shutil.copy(text, folder / "text/prose.txt")
        self.behind: list[subprocess.Popen[bytes]] = []

    def save(self, block: Block) -> None:
        path = self.folder / block.file
        found = yaml.safe_load(re.sub(r"(?m)^  (?=\w)", "", block.text)) if path.exists() else None
        if path.exists() and "steps" not in block.text.split("\n")[1]:  # a student to add
            job = yaml.safe_load(path.read_text())
            for name, learner in found.items():
                shrink(learner)
                job["students"][name] = learner
        else:
            job = yaml.safe_load(block.text)
            job = shrunk(job) if "teacher" in job else job
        path.write_text(yaml.safe_dump(job, sort_keys=False))

    def run(self, command: list[str], behind: bool) -> None:
        run = next((word for word in command if word.startswith("runs/")), "")
        words = [self.last_step(run) if word == "LAST" else fitting(word) for word in command]
        programs = {
            "tandem": ["-m", "tandem"],
            "torchrun": ["-m", "torch.distributed.run"],
        }
        argv = [sys.executable, *programs[words[0]], *words[1:]]
        if behind:
            argv += ["steps=2000"]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self.behind.append(
                subprocess.Popen(argv, cwd=self.folder, env=command_environment(), **quiet)
            )
            self.wait_for_steps(self.folder / "runs/live/metrics.jsonl")
            return
        if "name=live" in words:  # it has stopped later than the shrunk job ends
            argv += [f"steps={int(self.last_step('runs/live')) + 12}"]
        done = subprocess.run(
            argv,
            cwd=self.folder,
            env=command_environment(),
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"

    def last_step(self, run: str) -> str:
        """The last step of the run that the command is about."""
        steps = self.folder.glob(f"{run}/checkpoints/step-*")
        return str(max(int(path.name[5:]) for path in steps))

    def wait_for_steps(self, metrics: Path) -> None:
        until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, "a step", 300)

    def end(self) -> None:
        for process in self.behind:
            assert process.wait(timeout=300) == 75


def fitting(word: str) -> str:
    """A word of a command, replaced where a test cannot afford it."""
    small = {"8192": "600", "30522": "600", "steps=2200": "steps=14", "steps=20": "steps=2"}
    small |= {"text/*.txt": "text/prose.txt", "held_out.txt": "text/prose.txt"}
    return small.get(word, word)


@pytest.mark.slow
def test_the_guides_can_be_followed(text, tmp_path):
    walk = Walk(tmp_path, text)
    for page in PAGES[:-1]:
        for block in blocks(page):
            if block.kind == "yaml" and block.file:
                walk.save(block)
            elif block.kind == "bash" and block.is_run:
                for command in block.commands:
                    walk.run(command, block.in_background)
    walk.end()
    assert (tmp_path / "runs/hot/report.html").exists()


@pytest.mark.slow
def test_the_worked_plan_is_what_the_command_prints():
    page = (DOCS / "planning.md").read_text()
    worked, another = (block for block in blocks("planning.md") if block.is_run)
    assert planned(worked) == re.search(r"```text\n(.*?)```", page, re.S)[1]
    assert json.loads(planned(another))["fits"]


def planned(block: Block) -> str:
    """The output of the one command in a block."""
    (command,) = block.commands
    argv = [sys.executable, "-m", *command]
    done = subprocess.run(
        argv, env=command_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
