"""A job's YAML: what cannot be meant is refused by its key, before anything is done."""

from __future__ import annotations

import pytest

import configs
from tests.conftest import TINY_JOB
from trainer.config import JobConfig


def load(*overrides: str) -> JobConfig:
    return configs.load(str(TINY_JOB), JobConfig, "job", ["data.path=corpus", *overrides])


def refusal(*overrides: str) -> str:
    with pytest.raises(configs.ConfigError) as refused:
        load(*overrides)
    return str(refused.value).removeprefix(f"{TINY_JOB}: ")


def test_a_batch_may_be_stated_in_tokens():
    job = load("batch={tokens: 4096, growth: [{step: 5, tokens: 8192}]}", "batch.size=null")
    assert (job.batch.size, job.batch.tokens, job.batch.growth[0].size) == (None, 4096, None)
    text = "name: x\nsteps: 5\ndata: {path: c}\nteacher: {objective: {mlm: {}}}\nbatch: {tokens: 9}"
    job = configs.load_text(text, JobConfig, "job", [], "a file")
    assert (job.batch.size, job.batch.tokens) == (None, 9)
    assert configs.load_text(configs.dump(job), JobConfig, "job", [], "a file") == job
    assert refusal("batch={size: 4, tokens: 4096}").startswith("batch.tokens: ")
