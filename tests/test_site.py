"""The pages hang together: links, anchors, the site's list of pages, the site itself."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import configs
from tests.conftest import REPOSITORY

PAGES = [
    *REPOSITORY.glob("*.md"),
    *(REPOSITORY / "docs").rglob("*.md"),
    *(REPOSITORY / "benchmarks").glob("*.md"),
]
LINK = re.compile(r"\]\((?!\w+://|mailto:)([^)#\s]*)#?([^)\s]*)\)")
TITLE = re.compile(r"^#+ +(.+?) *$", re.M)
CODE = re.compile(r"^```.*?^```", re.M | re.S)


def anchor(title: str) -> str:
    """The anchor that GitHub and the site give to a title."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


@cache
def anchors(page: Path) -> set[str]:
    return {anchor(title) for title in TITLE.findall(CODE.sub("", page.read_text()))}


def is_broken(page: Path, target: str, fragment: str) -> bool:
    path = page.parent / target if target else page
    if not path.is_file():  # the site has no listing of a folder
        return True
    return bool(fragment) and (path.suffix != ".md" or fragment not in anchors(path.resolve()))


def test_every_link_leads_to_a_file_and_every_anchor_to_a_title():
    links = [
        (page, *link) for page in PAGES for link in LINK.findall(CODE.sub("", page.read_text()))
    ]
    assert len(links) > 200
    assert len([fragment for _, _, fragment in links if fragment]) > 20
    assert [
        f"{page.relative_to(REPOSITORY)}: {target}#{fragment}"
        for page, target, fragment in links
        if is_broken(page, target, fragment)
    ] == []


def sections() -> list[dict[str, Any]]:
    """The schemas of what a page shows: a whole file, one learner, or learners by name."""
    files = [
        json.loads((REPOSITORY / f"configs/schema/{kind}.json").read_text())
        for kind in ("job", "cluster", "model")
    ]
    learner = {"$ref": "#/$defs/LearnerConfig"}
    parts = [learner, {"type": "object", "additionalProperties": learner}]
    return [*files, *({**part, "$defs": files[0]["$defs"]} for part in parts)]


def has_keys_of_a_section(text: str) -> bool:
    value = configs.plain(dedent(text), "page")
    trees = [value, {"base": "demo", **value}]  # a file with a base may leave out any key
    return any(Draft202012Validator(part).is_valid(tree) for part in sections() for tree in trees)


EXAMPLES = [
    (page.name, text)
    for page in PAGES
    for text in re.findall(r"^ *```yaml\n(.*?)^ *```", page.read_text(), re.M | re.S)
    if "squared_relu" not in text  # which the page adds
]


@pytest.mark.parametrize(("page", "text"), EXAMPLES, ids=lambda value: str(value)[:60])
def test_an_example_in_yaml_has_the_keys_and_values_of_a_schema(page, text):
    assert has_keys_of_a_section(text)


@pytest.mark.parametrize("change", [("from_step", "from"), ("0.4", "4"), ("mlm", "mln")])
def test_a_key_or_value_that_no_schema_has_is_noticed(change):
    (text,) = (text for _, text in EXAMPLES if "next_token" in text)
    assert not has_keys_of_a_section(text.replace(*change))


def test_the_site_lists_every_page():
    listed = re.findall(
        r"^ *- (?:[\w ]+: )?(\S+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.M
    )
    assert sorted(listed) == sorted(str(page.relative_to(REPOSITORY)) for page in PAGES)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("zensical")
    for name in ("Makefile", "mkdocs.yml", "LICENSE", "docs", "configs", "benchmarks", "trainer"):
        path = REPOSITORY / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / name)
    for path in REPOSITORY.glob("*.md"):
        shutil.copy(path, tmp_path)
    make = ["make", "docs", "READY=", f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "build/site"
    built = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")}
    missing = {str(page.relative_to(REPOSITORY)) for page in PAGES} - built
    assert missing <= {"README.md", "docs/README.md"}  # these are index.html
    page = (site / "docs/studies.html").read_text()
    assert "<table>" in page
    assert (site / "docs/studies/results/cotraining.svg").exists()


@pytest.mark.parametrize(("page", "most"), [("README.md", 900), ("docs/studies.md", 1500)])
def test_a_page_for_a_reader_in_a_hurry_is_short(page, most):
    assert len((REPOSITORY / page).read_text().split()) <= most


def test_the_changes_since_the_last_version_are_told_shortly():
    unreleased = (REPOSITORY / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert unreleased.startswith("[Unreleased]")
    assert len(unreleased.split()) <= 1500
