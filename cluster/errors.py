"""The one exception of this package."""

from __future__ import annotations


class LaunchError(ValueError):
    """Something about how a job is started that its user can fix; the message is one line."""
