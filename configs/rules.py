"""The declarations beside the type of a config's field: bounds or choices, unit, and meaning.

    every: Annotated[int, COUNT, Unit("steps"), "Between two evaluations."] = 500

The text is the meaning of the key, in one or two sentences.

A rule applies to a scalar, to each item of a list, and to each value of a mapping. A rule with
`whole` applies to the container itself. A rule inside a type applies to that part:
``dict[Annotated[str, NAME], float]`` is about the keys. None is allowed wherever the type allows
it. `configs.section` checks the rules; `configs.reference` prints them.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any, ClassVar, TypeGuard

from configs.typed import shown


@dataclass(frozen=True)
class Unit:
    """The unit of a number: steps, sequences, GB."""

    name: str


@dataclass(frozen=True)
class Reading:
    """How the text of a key is read, other than as it stands."""

    name: str


PATH = Reading("path")  # with ~ and variables such as $SCRATCH
MOST_NAME_BYTES = 200  # of 255: endings such as -seed1 are added to names
VERBATIM = Reading("verbatim")  # interpolations are left to whoever reads it, such as a shell


class Rule(ABC):
    """A constraint on a value. In a message, `words` follow "must be"."""

    whole: ClassVar[bool] = False

    @property
    @abstractmethod
    def words(self) -> str:
        """The values that are allowed."""

    @abstractmethod
    def allows(self, value: Any) -> bool:
        """Whether a value, of any type, is allowed."""

    @abstractmethod
    def json_schema(self) -> dict[str, Any]:
        """The equivalent JSON schema keywords, as far as there are any."""

    def refusal(self, value: Any) -> str:
        """Why a value that is not allowed is refused."""
        return f"must be {self.words}, not {shown(value)}"


@dataclass(frozen=True)
class Range(Rule):
    """Numbers from `least` to `most`; either end may be exclusive."""

    least: float
    most: float
    with_least: bool = True
    with_most: bool = True

    @property
    def words(self) -> str:
        if not self.with_least:
            above = "positive" if self.least == 0 else f"above {self.least:.10g}"
            return f"{above}, and at most {self.most:g}"
        if not self.with_most:
            return f"at least {self.least:.10g}, and below {self.most:.10g}"
        if self.most >= _LARGEST:
            return f"at least {self.least:.10g}"
        return f"{self.least:.10g} to {self.most:.10g}"

    def allows(self, value: Any) -> bool:
        if not _is_number(value):
            return False
        low = self.least <= value if self.with_least else self.least < value
        return low and (value <= self.most if self.with_most else value < self.most)

    def refusal(self, value: Any) -> str:
        """Why a value is refused; names the upper bound that `words` leave out, where it counts."""
        if self.most >= _LARGEST and _is_number(value) and value > self.most:
            return f"must be at most {self.most:.16g}, not {shown(value)}"
        return super().refusal(value)

    def json_schema(self) -> dict[str, Any]:
        least = "minimum" if self.with_least else "exclusiveMinimum"
        most = "maximum" if self.with_most else "exclusiveMaximum"
        return {least: self.least, most: self.most}


@dataclass(frozen=True)
class PowerOfTwo(Range):
    """Powers of two from `least` to `most`."""

    @property
    def words(self) -> str:
        return f"a power of two, {super().words}"

    def allows(self, value: Any) -> bool:
        return super().allows(value) and float(value).hex().startswith("0x1.0000000000000p")


@dataclass(frozen=True, init=False)
class OneOf(Rule):
    """One of the `choices`, strings or numbers."""

    choices: tuple[Any, ...]

    def __init__(self, *choices: Any) -> None:
        object.__setattr__(self, "choices", choices)

    @property
    def words(self) -> str:
        return f"one of {', '.join(str(choice) or repr(choice) for choice in self.choices)}"

    def allows(self, value: Any) -> bool:
        return not isinstance(value, bool) and value in self.choices

    def json_schema(self) -> dict[str, Any]:
        return {"enum": list(self.choices)}


class OneKeyOf(OneOf):
    """One of the keys of a registry, to which plugins may add."""

    def __init__(self, registry: Mapping[str, Any]) -> None:
        object.__setattr__(self, "registry", registry)

    @property
    def choices(self) -> tuple[Any, ...]:
        return tuple(vars(self)["registry"])


@dataclass(frozen=True)
class TextEncoding(Rule):
    """Names of the text encodings that Python knows; hex and rot13 are none.

    Files are cut into lines before they are decoded, so a newline must be ASCII's, which utf-16's
    is not.
    """

    @property
    def words(self) -> str:
        return "a text encoding that extends ASCII, such as utf-8 or latin-1"

    def allows(self, value: Any) -> bool:
        try:
            return isinstance(value, str) and b"\n".decode(value) == "\n"
        except (LookupError, ValueError):
            return False

    def json_schema(self) -> dict[str, Any]:
        return {"minLength": 1}


TEXT_ENCODING = TextEncoding()


@dataclass(frozen=True)
class Matches(Rule):
    """Strings that match a whole regular expression; `description` says what they are."""

    pattern: str
    description: str

    @property
    def words(self) -> str:
        return self.description

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None

    def json_schema(self) -> dict[str, Any]:
        return {"pattern": f"^(?:{self.pattern})$"}


class FolderName(Rule):
    """A string that names a folder inside another one."""

    @property
    def words(self) -> str:
        return f"a plain folder name of at most {MOST_NAME_BYTES} bytes"

    def allows(self, value: Any) -> bool:
        if not value.isprintable() or len(value.encode()) > MOST_NAME_BYTES:
            return False
        return "/" not in value and value[:1] not in ("", ".", " ")

    def json_schema(self) -> dict[str, Any]:
        return {"pattern": "^[^./ ][^/]*$", "maxLength": MOST_NAME_BYTES}


@dataclass(frozen=True)
class NotEmpty(Rule):
    """Strings of at least one character."""

    @property
    def words(self) -> str:
        return "not empty"

    def allows(self, value: Any) -> bool:
        return bool(value)

    def refusal(self, value: Any) -> str:
        return "must not be empty"

    def json_schema(self) -> dict[str, Any]:
        return {"minLength": 1}


@dataclass(frozen=True)
class Filled(NotEmpty):
    """Lists and mappings of at least one value."""

    whole: ClassVar[bool] = True

    def json_schema(self) -> dict[str, Any]:
        return {"minItems": 1, "minProperties": 1}


@dataclass(frozen=True)
class Length(Rule):
    """Lists with this many items."""

    whole: ClassVar[bool] = True
    items: int

    @property
    def words(self) -> str:
        return f"a list of {self.items}"

    def allows(self, value: Any) -> bool:
        return len(value) == self.items

    def json_schema(self) -> dict[str, Any]:
        return {"minItems": self.items, "maxItems": self.items}


@dataclass(frozen=True)
class Ascending(Rule):
    """Lists in strictly ascending order: of numbers, or of sections `by` a key."""

    whole: ClassVar[bool] = True
    by: str = ""

    @property
    def words(self) -> str:
        return f"in the order of {self.by}, each once" if self.by else "in ascending order"

    def allows(self, value: Any) -> bool:
        numbers = [getattr(item, self.by) for item in value] if self.by else value
        return all(first < second for first, second in pairwise(numbers))

    def refusal(self, value: Any) -> str:
        return f"must be {self.words}"

    def json_schema(self) -> dict[str, Any]:
        return {"uniqueItems": True}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


_LARGEST = 2**53  # larger integers are not exact as floats


def positive(most: float) -> Range:
    """Numbers above 0, up to and including `most`."""
    return Range(0, most, with_least=False)


COUNT = Range(1, _LARGEST)
INDEX = Range(0, _LARGEST)
ROWS = Range(1, 2**31)  # in a batch
SECONDS = positive(1e9)  # larger values overflow the system's timers
HOURS = positive(1e6)  # about a century
WEIGHT = Range(0, 1e6)
GIGABYTES = Range(0, 1e9)
FRACTION = Range(0, 1)
PROBABILITY = Range(0, 1, with_most=False)  # of a dropout, which must keep something
NOT_EMPTY = NotEmpty()
