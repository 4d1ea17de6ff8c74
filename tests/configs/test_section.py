"""A section refuses what its fields forbid, however it is constructed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

import configs
from configs.rules import (
    COUNT,
    FRACTION,
    INDEX,
    NOT_EMPTY,
    PROBABILITY,
    WEIGHT,
    Ascending,
    Length,
    Matches,
    OneOf,
    PowerOfTwo,
    Unit,
    positive,
)
from configs.section import Refusal, Section
from configs.typed import shown

Setting = float | dict[Annotated[int, INDEX], float]


@dataclass
class Point(Section):
    at: int = 0


@dataclass
class Example(Section):
    """One key for each kind of rule."""

    count: Annotated[int, COUNT, Unit("steps")] = 1
    rate: Annotated[float | None, positive(1e9)] = None
    dropout: Annotated[float, PROBABILITY] = 0.0
    scale: Annotated[float, PowerOfTwo(1, 2**24)] = 1.0
    stage: Annotated[int, OneOf(0, 3)] = 0
    kind: Annotated[str, OneOf("", "wide")] = ""
    folder: Annotated[str | None, NOT_EMPTY] = None
    weight: Annotated[Setting, WEIGHT] = 1.0
    betas: Annotated[list[float], Length(2), PROBABILITY] = field(default_factory=lambda: [0, 0])
    steps: Annotated[list[int], Ascending()] = field(default_factory=list)
    points: Annotated[list[Point], Ascending(by="at")] = field(default_factory=list)
    shares: dict[Annotated[str, Matches("[a-z]+", "a word")], Annotated[float, FRACTION]] = field(
        default_factory=dict
    )
    layers: Annotated[str, OneOf("top")] | Annotated[list[int], COUNT] = "top"

    def conflicts(self) -> Iterator[Refusal]:
        if self.kind == "wide" and self.stage == 3:
            yield "stage", "must be 0 where kind is wide"


ALLOWED: list[dict[str, Any]] = [
    {"count": 2**53, "rate": 1e9, "dropout": 0.999, "scale": 2**24, "stage": 3, "folder": "a"},
    {"weight": {0: 0.0, 7: 1e6}, "betas": (0.9, 0.999), "steps": [1, 5], "shares": {"a": 1}},
    {"points": [Point(1), Point(2)], "layers": [1, 2], "kind": "wide"},
]
REFUSED: list[tuple[str, Any, str]] = [
    ("count", 0, "count: must be at least 1, not 0"),
    ("count", 2**53 + 1, "count: must be at most 9007199254740992, not 9007199254740993"),
    ("count", 10**400, f"count: must be at most 9007199254740992, not {shown(10**400)}"),
    ("count", True, "count: must be at least 1, not True"),
    ("count", "many", "count: must be at least 1, not 'many'"),
    ("rate", 0.0, "rate: must be positive, and at most 1e+09, not 0.0"),
    ("rate", float("nan"), "rate: must be positive, and at most 1e+09, not nan"),
    ("dropout", 1.0, "dropout: must be at least 0, and below 1, not 1.0"),
    ("scale", 3.0, "scale: must be a power of two, 1 to 16777216, not 3.0"),
    ("scale", 2.0**25, "scale: must be a power of two, 1 to 16777216, not 33554432.0"),
    ("stage", 1, "stage: must be one of 0, 3, not 1"),
    ("stage", False, "stage: must be one of 0, 3, not False"),
    ("kind", "flat", "kind: must be one of '', wide, not 'flat'"),
    ("folder", "", "folder: must not be empty"),
    ("weight", -1.0, "weight: must be 0 to 1000000, not -1.0"),
    ("weight", {0: 1.0, 5: 1e7}, "weight.5: must be 0 to 1000000, not 10000000.0"),
    ("weight", {-1: 1.0}, "weight: a key must be at least 0, not -1"),
    ("betas", [0.9], "betas: must be a list of 2, not [0.9]"),
    ("betas", [0.9, 1.0], "betas[1]: must be at least 0, and below 1, not 1.0"),
    ("steps", [5, 5], "steps: must be in ascending order"),
    ("points", [Point(2), Point(1)], "points: must be in the order of at, each once"),
    ("shares", {"a": 2.0}, "shares.a: must be 0 to 1, not 2.0"),
    ("shares", {"A": 1.0}, "shares: a key must be a word, not 'A'"),
    ("layers", "bottom", "layers: must be one of top, not 'bottom'"),
    ("layers", [1, 0], "layers[1]: must be at least 1, not 0"),
]


@pytest.mark.parametrize("values", ALLOWED)
def test_what_the_rules_allow_is_taken(values: dict[str, Any]) -> None:
    assert dataclasses.replace(Example(), **values) == Example(**values)


@pytest.mark.parametrize(("key", "value", "words"), REFUSED)
def test_a_value_that_breaks_a_rule_is_refused_by_its_key(key: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - all of its words are compared
        Example(**{key: value})
    assert str(refused.value) == words
    with pytest.raises(ValueError, match=f"^{key}"):
        dataclasses.replace(Example(), **{key: value})


def test_keys_are_compared_once_each_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"^stage: must be 0 where kind is wide$"):
        Example(kind="wide", stage=3)
    with pytest.raises(ValueError, match=r"^count: "):
        Example(count=0, kind="wide", stage=3)


def test_a_section_names_the_keys_that_differ_from_their_defaults() -> None:
    section = Example(rate=2.0, steps=[], betas=[0, 0.5], points=[Point()], kind="")
    keys = ("points", "count", "rate", "steps", "betas", "kind")
    assert [*section.changed(*keys)] == ["points", "rate", "betas"]


@dataclass
class Outer(Section):
    inner: Example = field(default_factory=Example)
    by_name: dict[str, Example] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"inner": {"betas": [0, 2]}}, "inner.betas[1]: must be at least 0, and below 1, not 2.0"),
        ({"by_name": {"a": {"weight": {"3": -1}}}}, "by_name.a.weight.3: must be 0 to 1000000"),
        ({"inner": {"kind": "wide", "stage": 3}}, "inner.stage: must be 0 where kind is wide"),
    ],
)
def test_the_reader_names_the_key_in_full(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(configs.ConfigError, match=rf"^a file: {words[:20].split('[')[0]}") as one:
        configs.validate(tree, Outer, "a file")
    assert str(one.value).startswith(f"a file: {words}")
