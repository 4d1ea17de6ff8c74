"""DeepSpeed as it is: what Tandem replaces in it belongs to the releases that were tried."""

from __future__ import annotations

import logging

import deepspeed
import pytest

from trainer.learners import zero


@pytest.fixture(autouse=True)
def _asked_anew():
    zero.replaces.cache_clear()
    yield
    zero.replaces.cache_clear()


def test_a_release_that_nobody_tried_runs_as_it_is_with_one_warning(monkeypatch, caplog) -> None:
    monkeypatch.setattr(deepspeed, "__version__", "0.99.1")
    with caplog.at_level(logging.WARNING):
        assert not zero.replaces()
        assert not zero.replaces()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("DeepSpeed 0.99.1 runs as it is: from zero_stage 1 on ")


@pytest.mark.parametrize("release", [*zero.TRIED, f"{zero.TRIED[0]}+abc"])
def test_a_release_that_was_tried_is_adapted_but_not_where_it_must_not_be(
    monkeypatch, release: str
) -> None:
    monkeypatch.delenv("TANDEM_PLAIN_DEEPSPEED", raising=False)
    monkeypatch.setattr(deepspeed, "__version__", release)
    assert zero.replaces()
    zero.replaces.cache_clear()
    monkeypatch.setenv("TANDEM_PLAIN_DEEPSPEED", "1")
    assert not zero.replaces()
