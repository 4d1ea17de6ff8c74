"""The data of a job: growing batches, changing lengths and packings, masks made by the job."""

from __future__ import annotations

import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import configs
from data_pipeline import BatchStream, BuildOptions, build
from data_pipeline.shards.ranges import Staged
from tests.distributed import run_distributed
from tests.trainer import jobs
from trainer.job_data.counting import global_batches, usual_rows
from trainer.objectives.task import Part

GROWING = (
    "batch.size=4",
    "batch.growth=[{step: 3, size: 12}, {step: 5, size: 8}]",
    "data.sequence_length=16",
    "data.phases=[{from_step: 4, sequence_length: 32, packing: segment_pair}]",
    "teacher.zero_stage=3",
    "evaluation.sequences=6",
)


@pytest.fixture(scope="module")
def blocks(text, corpus, tmp_path_factory) -> Path:
    """The text of `corpus` in blocks and shards of a few documents, so that epochs end soon."""
    folder = tmp_path_factory.mktemp("blocks") / "data"
    options = {"shard_mb": 0.02, "block_bytes": 8000, "val_fraction": 0.1}
    build(BuildOptions([str(text)], str(corpus / "tokenizer"), **options), str(folder))
    return folder


@pytest.fixture(scope="module")
def damaged(blocks) -> Path:
    """The same corpus with one byte changed in every training shard except the first two."""
    copied = blocks.with_name("damaged")
    shutil.copytree(blocks, copied)
    for shard in sorted((copied / "train").glob("*.tar"))[2:]:
        data = bytearray(shard.read_bytes())
        data[2000] ^= 1
        shard.write_bytes(data)
    return copied


def curves_on_two_ranks(corpus: Path, damaged: Path, runs: Path) -> dict[str, list]:
    def job(name: str, *overrides: str, data: Path = corpus):
        return jobs.tiny_job(data, runs, f"name={name}", *overrides)

    growing = job("growing", *GROWING)
    interrupted = job("interrupted", *GROWING)
    jobs.run(interrupted, stop_after=2)
    copied = count_copies()
    found = {
        "growing": jobs.run(growing),
        "interrupted": jobs.run(interrupted),
        "staged": jobs.run(job("staged", *GROWING, f"data.stage={runs}")),
        "host": jobs.run(job("host", "steps=3", "students=null")),
        "device": jobs.run(
            job("device", "steps=3", "students=null", "data.masking.on_device=true")
        ),
        "skipping": jobs.run(
            job("skipping", "steps=3", "students=null", "data.on_bad_shard=skip", data=damaged)
        ),
    }
    assert not list(runs.glob("tandem-staged-*"))
    curves = {name: jobs.curve(folder) for name, folder in found.items()}
    return {**curves, "copied": copied}


def count_copies() -> list[str]:
    """A list that gets the shard name of each block that this process copies."""
    copied: list[str] = []
    put = Staged.put

    def counted(self: Staged, name: str, offset: int, data: bytes) -> None:
        copied.append(name)
        put(self, name, offset, data)

    Staged.put = counted
    return copied


def curve_on_one_rank(corpus: Path, runs: Path) -> list:
    return jobs.curve(jobs.run(jobs.tiny_job(corpus, runs, "name=alone", *GROWING)))


@pytest.fixture(scope="module")
def curves(blocks, damaged, tmp_path_factory):
    return run_distributed(
        curves_on_two_ranks, 2, blocks, damaged, tmp_path_factory.mktemp("runs")
    )[0]


def column(curve: list, key: str) -> list[float]:
    return [value for _, name, value in curve if name == key]


@pytest.mark.slow
def test_a_growing_batch_is_the_same_training_on_any_number_of_ranks(
    curves, blocks, tmp_path_factory
):
    """Accumulation varies by step and by number of ranks; the losses do not."""
    alone = run_distributed(curve_on_one_rank, 1, blocks, tmp_path_factory.mktemp("runs"))[0]
    ours = curves["growing"]
    assert [key for _, key, _ in ours] == [key for _, key, _ in alone]
    worst = defaultdict(float)
    for (step, key, mine), (_, _, theirs) in zip(ours, alone, strict=True):
        if key in ("tokens", "padding"):
            assert mine == theirs, (step, key)
        elif key.endswith("loss"):
            worst[key] = max(worst[key], abs(mine / theirs - 1))
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.slow
def test_resuming_across_a_growth_and_a_change_of_length_is_the_same_run(curves):
    assert curves["interrupted"] == curves["growing"]


@pytest.mark.slow
def test_reading_from_the_nodes_own_disk_is_the_same_run(curves):
    """One rank of the node copies for both."""
    assert curves["staged"] == curves["growing"]
    assert curves["copied"]


@pytest.mark.slow
def test_a_job_reads_what_its_stream_holds(curves, blocks, tmp_path):
    """The tokens and padding of every step, and the rows that its batches grow to."""
    config = jobs.tiny_job(blocks, tmp_path, *GROWING)
    stream = BatchStream.open(config.data, "train", config.seed, global_batches(config))
    batches = [stream.batch(step) for step in range(config.steps)]
    assert [len(batch.input_ids) for batch in batches] == [4, 4, 4, 12, 12, 8, 8, 8]
    used = np.cumsum([batch.attention_mask.sum() for batch in batches])
    trained = [step for step, key, _ in curves["growing"] if key == "teacher/loss"]
    assert trained == list(range(1, 9))
    logged = dict.fromkeys(column(curves["growing"], "tokens"))  # also at evaluations
    assert list(logged) == used.tolist()
    padding = [1 - batch.attention_mask.mean() for batch in batches]
    assert column(curves["growing"], "padding") == pytest.approx(padding)


@pytest.mark.slow
def test_masks_made_by_the_job_are_the_same(curves):
    assert curves["device"] == curves["host"]


@pytest.mark.slow
def test_sequences_that_cannot_be_read_are_counted(curves, damaged, tmp_path):
    config = jobs.tiny_job(damaged, tmp_path, "data.on_bad_shard=skip")
    stream = BatchStream.open(config.data, "train", config.seed, 8)
    lost = np.cumsum([(~stream.batch(step).readable).sum() for step in range(3)])
    assert lost[-1] > 0
    found = column(curves["skipping"], "unreadable")
    assert found == [count for count in lost if count]


def test_batches_may_be_stated_in_tokens(blocks, tmp_path):
    """About this many tokens at every length and packing, in a multiple of sequences."""
    config = jobs.tiny_job(
        blocks,
        tmp_path,
        *GROWING[2:],
        "batch={size: null, tokens: 2000, multiple: 4, growth: [{step: 6, tokens: 4000}]}",
    )
    assert usual_rows(config) == 2000 // 16 // 4 * 4  # six of 8 steps
    sizes = global_batches(config)
    assert sizes.starts == (0, 4, 6)
    stream = BatchStream.open(config.data, "train", config.seed, sizes)
    for step, tokens in ((0, 2000), (4, 2000), (6, 4000), (7, 4000)):
        batch = stream.batch(step)
        assert len(batch.input_ids) % 4 == 0
        assert batch.attention_mask.sum() == pytest.approx(tokens, rel=0.15)


def test_settings_that_cannot_be(blocks, tmp_path):
    for override, message in (
        ("batch={size: 8, tokens: 100}", "batch.tokens: set either size or tokens"),
        (
            "batch.growth=[{step: 5, size: 8}, {step: 5, size: 16}]",
            "batch.growth: must be in the order of step",
        ),
        ("batch.growth=[{step: 5}]", "tokens: set either"),
        ("data.masking={unit: word, on_device: true}", "data.masking.on_device: needs unit"),
    ):
        with pytest.raises(configs.ConfigError, match=message) as caught:
            jobs.tiny_job(blocks, tmp_path, override)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fraction", [0.5, 0.45, 0.4, 0.3, 1 / 3, 0.1, 0.07])
def test_as_many_examples_are_held_out_as_are_asked_for(fraction: float) -> None:
    held, trained = (Part(is_held_out, fraction) for is_held_out in (True, False))
    units = range(100)
    chosen = [unit for unit in units if held.has(unit)]
    assert len(chosen) == int(100 * fraction + 1e-9)
    assert {unit % 2 for unit in chosen} == {0, 1}  # of two labels in turn, both are scored
    assert [unit for unit in units if not trained.has(unit)] == chosen
