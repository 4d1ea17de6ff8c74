"""Seeds derived from one another by hashing, so that nothing random depends on what ran before.

Every learner's initial weights and every step's dropout have seeds of their own. A student is
therefore the same bit for bit whichever learners train beside it, and a resumed job has no
generator state to restore.
"""

from __future__ import annotations

import hashlib


def derive(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of `parts`."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
