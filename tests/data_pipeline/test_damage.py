"""Damaged corpora: found, named, and either fatal or skipped with exact accounting."""

from __future__ import annotations

import contextlib
import io
import random
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import MASKED, PAIRS, BadShard, BatchSizes, BatchStream, Corpus, DataConfig
from data_pipeline.building.checking import check
from data_pipeline.packing.sequences import PackingRules
from data_pipeline.reading.dumping import show
from data_pipeline.shards import manifest
from data_pipeline.shards.blocks import MEMBERS, RECORD, Block, decode_block, encode_block
from data_pipeline.shards.index import shard_name

SHARD = 1


@pytest.fixture
def copied(corpus: Corpus, tmp_path: Path) -> Path:
    shutil.copytree(corpus.folder, tmp_path / "corpus")
    return tmp_path / "corpus"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def add_member(path: Path) -> None:
    with tarfile.open(path, "a") as tar:
        tar.addfile(tarfile.TarInfo("stranger.pickle"), io.BytesIO(b""))


def claim_to_be_huge(path: Path) -> None:
    """Make the header of the first member claim a size larger than any file."""
    data = path.read_bytes()
    header = bytearray(tarfile.TarInfo("block-000000000.tokens.npy").tobuf())
    header[124:136] = b"\x80" + b"\xff" * 11
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(bytes(header) + data[RECORD:])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "flipped": flip,
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "stranger": add_member,
    "huge": claim_to_be_huge,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_names_the_shard(copied: Path, damage: str) -> None:
    assert check(str(copied)) == []
    path = copied / "train" / shard_name(SHARD)
    DAMAGES[damage](path)
    found = check(str(copied))
    assert found
    assert all(path.name in line for line in found)
    if damage == "stranger":
        assert any("stranger.pickle" in line for line in found)


def test_check_finds_damaged_indexes(copied: Path) -> None:
    truncate(copied / "train" / "blocks.npy")
    (line,) = check(str(copied))
    assert re.search(r"blocks\.npy: .*; the shards beside it are not checked", line)
    (copied / "val" / "sentences.u16").unlink()
    assert any("sentences.u16" in line for line in check(str(copied)))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "empty"])
@pytest.mark.parametrize("packing", ["full_sentences", "segment_pair"])
def test_bad_shards_stop_or_are_skipped_row_by_row(
    copied: Path,
    corpus: Corpus,
    damage: str,
    packing: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shard = copied / "train" / shard_name(SHARD)
    shutil.rmtree(copied / "train" / "cache", ignore_errors=True)
    DAMAGES[damage](shard)
    options = {"path": str(copied), "sequence_length": 64, "packing": packing}
    stopping = BatchStream.open(DataConfig(**options), "train", 1, 8)
    steps = -(-stopping.samples_per_epoch // 8)
    with pytest.raises(BadShard, match=f"{shard.name}: .*; restore it, or set") as caught:
        list(map(stopping.batch, range(steps)))
    assert "\n" not in str(caught.value)

    skipping = BatchStream.open(DataConfig(**options, on_bad_shard="skip"), "train", 1, 8)
    good = BatchStream(corpus.split("train"), DataConfig(**options), 1, 8)
    lost = 0
    for step in range(steps):
        one, other = skipping.batch(step), good.batch(step)
        np.testing.assert_array_equal(one.sample_ids, other.sample_ids)
        np.testing.assert_array_equal(one.epochs, other.epochs)
        bad = one.attention_mask.sum(1) == 2
        lost += bad.sum()
        np.testing.assert_array_equal(one.readable, ~bad)
        assert (one.targets[MASKED].labels[bad] == -100).all()
        if PAIRS in one.targets:
            assert (one.targets[PAIRS].labels[bad] == -100).all()
        np.testing.assert_array_equal(one.input_ids[~bad], other.input_ids[~bad])
        np.testing.assert_array_equal(one.labels()[~bad], other.labels()[~bad])
    named = [one.message for one in caplog.records if "without labels" in one.message]
    assert len(named) == 1
    assert shard.name in named[0]
    split = corpus.split("train")
    counts = corpus.split("train").sequence_counts(PackingRules(packing, 64))
    blocks = [b for b in range(len(split.index.blocks)) if split.index.shard_of(b) == SHARD]
    broken = 0
    for block in blocks:
        try:
            Corpus.open(str(copied)).split("train").read_block(block)
        except BadShard:
            broken += int(counts.per_block[block])
    wrapped = steps * 8 - counts.total  # rows of the last batch that belong to the next epoch
    # A pair whose second segment lies in another block of its pool is lost with that block.
    exchanged = 0 if packing == "full_sentences" else broken
    assert broken <= lost <= broken + exchanged + wrapped


def test_pickles_are_never_read() -> None:
    members = io.BytesIO()
    with tarfile.open(fileobj=members, mode="w") as tar:
        content = io.BytesIO()
        np.save(content, np.array([print, "x"], object), allow_pickle=True)
        for name in ("tokens", "sentences", "documents"):
            header = tarfile.TarInfo(f"block-000000000.{name}.npy")
            header.size = content.tell()
            content.seek(0)
            tar.addfile(header, content)
    with pytest.raises(ValueError, match="unexpected array"):
        decode_block(members.getvalue())


def test_whatever_a_block_holds_is_a_block_or_an_error_that_is_expected() -> None:
    plain = Block(np.arange(50, dtype="<u2"), np.full(2, 25, "<u2"), np.array([2], "<u4"))
    data = encode_block("block-000000000", plain)
    found = decode_block(data)
    for name in MEMBERS:
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name), strict=True)
    draw, decoded = random.Random(0), 0
    for _ in range(2000):
        changed = bytearray(data)
        # The length and text of the first npy header, of which no checksum knows.
        changed[RECORD + draw.randrange(8, 128)] = draw.randrange(256)
        with contextlib.suppress(ValueError, tarfile.TarError):
            found = decode_block(bytes(changed))
            assert {getattr(found, name).dtype.kind for name in MEMBERS} == {"u"}
            decoded += 1
    assert 0 < decoded < 2000


def test_a_sample_that_cannot_be_read_is_shown_as_such(copied: Path) -> None:
    for shard in (copied / "train").glob("shard-*.tar"):
        shard.unlink()
    config = DataConfig(path=str(copied), packing="sop", on_bad_shard="skip")
    assert ", unreadable" in "".join(map(str, show(config, 0, BatchSizes.constant(2), 2)))


def test_a_member_that_is_not_ours_is_named_though_its_checksum_is_right(copied: Path) -> None:
    shard, index = copied / "train" / shard_name(0), copied / "train" / "blocks.npy"
    for name in (b"strange.npy", b"tokens.pyd"):  # the latter breaks the checksum of the header
        data = shard.read_bytes().replace(b"tokens.npy", name, 1)
        shard.write_bytes(data)
        blocks = np.load(index)
        blocks["crc32"][0] = zlib.crc32(data[: int(blocks["bytes"][0])])
        np.save(index, blocks)
        split = Corpus.of(str(copied), copied, manifest.read(copied)).split("train")
        with pytest.raises(BadShard, match=r"shard-000000\.tar: block 0 is malformed"):
            split.read_block(0)


def test_check_reads_every_shard_once_and_in_order(copied: Path) -> None:
    """By the kernel's count of what this process reads; the index is small beside the shards."""
    if not Path("/proc/self/io").exists():
        pytest.skip("needs Linux")

    def read_so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    stored = sum(path.stat().st_size for path in copied.rglob("*") if path.is_file())
    check(str(copied))  # imports, caches
    before = read_so_far()
    assert check(str(copied)) == []
    assert read_so_far() - before < 1.2 * stored
