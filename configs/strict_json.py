"""JSON that every parser takes, and a parser that any text may be given."""

from __future__ import annotations

import json
import math
from typing import Any


def strict_json(tree: Any) -> str:
    """Plain data as indented JSON that every parser takes: a number that is not finite is null."""
    return json.dumps(_finite(tree), indent=2, allow_nan=False)


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says. Raises ValueError for any other, also one of endless brackets."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
