"""What `make test-all` varies more widely than `make test`, in the same tests."""

from __future__ import annotations

import os

IS_THOROUGH = os.environ.get("TANDEM_TEST_ALL") == "1"


def zero_stages(*quick: int) -> tuple[int, ...]:
    """All ZeRO stages in a thorough run, otherwise these."""
    return (0, 1, 2, 3) if IS_THOROUGH else quick
