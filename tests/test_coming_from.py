"""The tables for those who come from another tool name keys, values and options that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import click
import pytest
import yaml
from jsonschema import Draft202012Validator

from tandem import main
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs/coming_from.md").read_text()
CELLS = [row.split(" | ")[1] for row in re.findall(r"^\| (.*) \|", PAGE, re.M) if " | " in row]
NAMED = sorted({name for cell in CELLS for name in re.findall(r"`([^`]+)`", cell)})
KEYS = [name for name in NAMED if not name.startswith("tandem ")]
COMMANDS = [name for name in NAMED if name.startswith("tandem ")]
SCHEMA = json.loads((REPOSITORY / "configs/schema/job.json").read_text())


def resolved(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and everything that it refers to or is made of."""
    yield schema
    parts = [part for word in ("anyOf", "oneOf", "allOf") for part in schema.get(word, [])]
    parts += [schema[word] for word in ("then", "else") if word in schema]
    if "$ref" in schema:
        parts.append(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    for part in parts:
        yield from resolved(part)


def below(schemas: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The schemas of a key in sections of these schemas."""
    values = []
    for schema in schemas:
        values += [schema["properties"][key]] if key in schema.get("properties", {}) else []
        names = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
        values += [names for names in names if isinstance(names, dict)]
    return [part for value in values for part in resolved(value)]


@pytest.mark.parametrize("named", KEYS)
def test_a_key_of_the_tables_is_one_of_a_job(named):
    path, _, value = named.partition(": ")
    schemas = [*resolved(SCHEMA)]
    for key in path.split("."):
        schemas = below(schemas, key)
        assert schemas, f"{named}: no key {key}"
    if value:
        allowed = [part for part in schemas if "enum" in part or "const" in part or "type" in part]
        validators = [Draft202012Validator({**part, "$defs": SCHEMA["$defs"]}) for part in allowed]
        assert any(one.is_valid(yaml.safe_load(value)) for one in validators), named


@pytest.mark.parametrize("named", COMMANDS)
def test_an_option_of_the_tables_is_one_of_a_command(named):
    command: click.Command = main
    words = named.split()[1:]
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options
