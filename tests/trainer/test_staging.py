"""Which rank copies what for its node; see also `tests/data_pipeline/test_staging.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

import configs
from data_pipeline import BatchStream, DataError, open_corpora
from tests.conftest import TINY_JOB
from tests.waiting import until
from trainer.config import JobConfig
from trainer.job_data.counting import global_batches
from trainer.job_data.feed import folder_on_node, shares_of, stager_of_node


@pytest.mark.parametrize(
    ("ranks", "world_size", "shares"),
    [
        ([0], 1, [(0, 1)]),
        ([0, 1, 2, 3], 8, [(0, 2)]),
        ([4, 5, 6, 7], 8, [(1, 2)]),
        ([0, 2], 4, [(0, 4), (2, 4)]),  # dealt out in turn
        ([1, 2], 4, [(1, 4), (2, 4)]),
        ([0, 1], 3, [(0, 3), (1, 3)]),  # nodes of unequal numbers of ranks
    ],
)
def test_what_the_ranks_of_a_node_read_together(ranks, world_size, shares):
    assert shares_of(ranks, world_size) == shares
    rows = 24
    read = [set(range(r * rows // w, (r + 1) * rows // w)) for r, w in shares]
    each = [set(range(r * rows // world_size, (r + 1) * rows // world_size)) for r in ranks]
    assert set().union(*read) == set().union(*each)


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tiny(corpus: Path, runs: Path, *overrides: str) -> JobConfig:
    places = [f"data.path={corpus}", f"output_dir={runs}"]
    return configs.load(str(TINY_JOB), JobConfig, "job", [*places, *overrides])


def test_a_job_reads_the_same_from_its_nodes_own_disk(corpus, tmp_path, alone, monkeypatch):
    """From a step in the middle, as after a restart."""
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "local"))
    (tmp_path / "local").mkdir()
    config = tiny(corpus, tmp_path / "runs", "data.stage=$NODE_DISK")
    folder = folder_on_node(config, 3)
    assert folder.parent == tmp_path / "local"
    assert folder.name.endswith("-3")
    rest = ("train", config.seed, global_batches(config))
    plain = BatchStream.open(config.data, *rest)
    staged = BatchStream.open(config.data, *rest, staged=folder)
    with stager_of_node(config, open_corpora(config.data), folder, 2) as stager:
        until(lambda: list(folder.glob("*/shard-*")), "a copy")
        for step in range(2, 40):
            stager.reached(step)
            np.testing.assert_array_equal(staged.batch(step).input_ids, plain.batch(step).input_ids)
    assert not folder.exists()


def test_without_the_key_nothing_is_staged_and_a_variable_must_be_set(corpus, tmp_path):
    assert folder_on_node(tiny(corpus, tmp_path), 1) is None
    with pytest.raises(
        DataError, match=r"data\.stage: \$NO_DISK_HERE names a variable that is not set"
    ):
        folder_on_node(tiny(corpus, tmp_path, "data.stage=$NO_DISK_HERE"), 1)
