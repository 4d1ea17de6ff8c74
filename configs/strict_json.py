"""Writing JSON that every parser accepts, and parsing JSON safely."""

from __future__ import annotations

import json
import math
from typing import Any


def strict_json(tree: Any) -> str:
    """Plain data as indented, strict JSON: non-finite numbers become null."""
    return json.dumps(_finite(tree), indent=2, allow_nan=False)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if the text is not JSON, or is nested too deeply."""
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


def is_torn(line: bytes) -> bool:
    """Whether a crash may have left this of a line of JSON: the beginning of an object, or NULs."""
    return not line.endswith(b"\n") and (line[:1] in (b"", b"{") or not line.strip(b"\0"))
