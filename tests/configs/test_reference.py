"""The reference page and JSON schemas match the declarations and accept the shipped files."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated, Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

import configs
from commands.reference import REPOSITORY, TASK, kinds, made_files
from configs.reference import json_schema, reference
from configs.rules import COUNT, Ascending, Length, OneOf, Range, Unit
from configs.section import Section
from tests.bad_values import beyond_its_rules, keys

MADE = made_files()
FILES = sorted((REPOSITORY / "configs").glob("*/*.yaml"))
PAGE = REPOSITORY / "docs" / "reference.md"
BEYOND = {"job": 200, "data": 20, "model": 40, "cluster": 10, "device": 6, "study": 0, "suite": 0}
SHIPPED = {
    kind: json.loads((REPOSITORY / "configs" / "schema" / f"{kind}.json").read_text())
    for kind in (*kinds(), TASK)
}


# Schemas refer to others in their folder by the name of the file.
FOLDER: Registry[Any] = Registry().with_resources(
    (f"{kind}.json", Resource.from_contents(schema)) for kind, schema in SHIPPED.items()
)


def complaints(schema: dict[str, Any], tree: Any) -> list[str]:
    """What an editor would mark as an error; empty where nothing is wrong."""
    validator = Draft202012Validator(schema, registry=FOLDER)
    return [error.message for error in validator.iter_errors(tree)]


def read(path: Path) -> dict[str, Any]:
    return configs.plain(path.read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.name)
def test_what_is_made_from_the_declarations_is_current(path: Path) -> None:
    stale = f"{path.name} is stale: run `python -m commands.reference` and commit what it writes"
    assert path.exists(), stale
    assert path.read_text(encoding="utf-8") == MADE[path], stale


@pytest.mark.parametrize("kind", SHIPPED)
def test_a_shipped_schema_is_valid_json_schema(kind: str) -> None:
    Draft202012Validator.check_schema(SHIPPED[kind])


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_file_names_its_schema_and_keeps_it(path: Path) -> None:
    kind = path.parent.name
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    assert first == f"# yaml-language-server: $schema=../schema/{kind}.json"
    assert complaints(SHIPPED[kind], read(path)) == []


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("job", "demo", {"stepz": 3}),
        ("job", "demo", {"teacher": {"modle": "bert_base"}}),
        ("job", "demo", {"teacher": {"model": "bert_bse"}}),
        ("job", "demo", {"steps": "many"}),
        ("data", "bert", {"base": "bret"}),
        ("task", "sst2", {"base": "bert"}),
        ("task", "sst2", {"teacher": {"optimizer": {"learning_rate": -1}}}),
        ("device", "h100", {"memory_gb": 0}),
        ("device", "h100", {"tflops": {"fp33": 1}}),
    ],
)
def test_a_mistake_is_underlined(kind: str, name: str, change: dict[str, Any]) -> None:
    tree = read(REPOSITORY / "configs" / kind / f"{name}.yaml")
    assert complaints(SHIPPED[kind], tree | change) != []


@pytest.mark.parametrize("kind", kinds())
def test_what_a_rule_refuses_is_underlined(kind: str) -> None:
    editor = Draft202012Validator(SHIPPED[kind])
    every = keys(kinds()[kind], named="one")
    bad = [value for key in every for value in beyond_its_rules(key)]
    assert len(bad) >= BEYOND[kind]
    # Without a kind a schema takes what any kind takes; `kind: transformers` may have no layers.
    for one in (value for value in bad if (value.key, value.value) != ("layers", "0")):
        tree: Any = configs.plain(f"value: {one.value}", "a test")["value"]
        for name in reversed(one.key.split(".")):
            tree = {name: tree}
        assert not editor.is_valid({"base": "any.yaml"} | tree), one


def test_every_key_has_a_meaning() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    assert len(rows) > 200
    assert [row for row in rows if row.endswith("|  |")] == []


def test_the_page_names_each_place_of_a_section_once() -> None:
    sections = re.findall(r"(?m)^### \w+: (.+)\n\nAlso (.+)\.$", MADE[PAGE])
    assert len(sections) > 20
    for title, line in sections:
        places = [f"`{title}`", *line.split(", ")]
        assert sorted(set(places)) == sorted(places)


@dataclasses.dataclass
class Layer(Section):
    """A layer."""

    width: Annotated[int, COUNT, "Its width."] = 8


# As a plugin's section is made.
Net = dataclasses.make_dataclass(
    "Net",
    [
        ("kind", Annotated[str, OneOf("wide", "deep"), "Its shape."]),
        (
            "rate",
            Annotated[float | dict[int, float] | None, Range(0, 1), Unit("a step")],
            dataclasses.field(default=0.5),
        ),
        ("ends", Annotated[list[int], Length(2), Ascending()], dataclasses.field(default=None)),
        ("layers", list[Layer], dataclasses.field(default_factory=list)),
        ("by_name", dict[str, Layer], dataclasses.field(default_factory=dict)),
    ],
    bases=(Section,),
)
NETS = json_schema("net", Net, {"net": ["small"], "layers": ["thick"]})


def test_a_section_that_is_made_while_running_is_on_the_page() -> None:
    page = reference({"net": Net})
    assert "| `kind` | text | required |  | one of wide, deep | Its shape. |" in page
    rate = "| `rate` | number, or numbers by whole number, or null | `0.5` | a step | 0 to 1 |"
    assert rate in page
    assert (
        "| `ends` | list of whole numbers | `null` |  | a list of 2; in ascending order |" in page
    )
    assert "| `layers` | list of [sections](#net-layers) | `[]` |  |  | A layer. |" in page
    assert "### net: layers[]\n\nAlso `by_name.NAME`.\n\nA layer.\n" in page
    assert page.count("| `width` | whole number | `8` |  | at least 1 | Its width. |") == 1


@pytest.mark.parametrize(
    "tree",
    [
        {"kind": "wide"},
        {"base": "small"},
        {"base": "folder/net.yaml", "rate": None},
        {"kind": "deep", "rate": {"0": 1.0, "100": 0.5}, "ends": [1, 2]},
        {"kind": "deep", "layers": ["thick", {"width": 3}], "by_name": {"a": None}},
    ],
)
def test_a_list_of_tagged_sections_has_a_schema_that_accepts_it(tree: dict[str, Any]) -> None:
    assert complaints(NETS, tree) == []


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"kind": "flat"},
        {"kind": "wide", "rat": 1},
        {"kind": "wide", "rate": 1.5},
        {"kind": "wide", "rate": {"0": 2.0}},
        {"kind": "wide", "rate": {"first": 1.0}},
        {"kind": "wide", "ends": [1, 2, 3]},
        {"kind": "wide", "layers": ["thin"]},
        {"kind": "wide", "layers": [{"width": 0}]},
        {"base": "large"},
    ],
)
def test_its_schema_refuses_what_the_rules_refuse(tree: dict[str, Any]) -> None:
    assert complaints(NETS, tree) != []
