"""Corpora behind URLs: the same batches, a bounded shared cache, retries, stalls, mixtures."""

from __future__ import annotations

import errno
import fcntl
import functools
import http.server
import multiprocessing
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import (
    BadShard,
    BatchStream,
    Corpus,
    DataConfig,
    DataError,
    SourceConfig,
    open_corpora,
)
from data_pipeline.order import rows_of_sources
from data_pipeline.shards import manifest, sources
from data_pipeline.shards.manifest import unfinished_name
from tests.damage import damages

STEPS = 40


def stream(path: str, cache: Path, **options) -> BatchStream:
    config = DataConfig(path=path, sequence_length=64, cache_dir=str(cache), **options)
    return BatchStream.open(config, "train", 3, 6)


def assert_same_batches(one: BatchStream, other: BatchStream) -> None:
    for step in range(STEPS):
        left, right = one.batch(step), other.batch(step)
        np.testing.assert_array_equal(left.input_ids, right.input_ids)
        np.testing.assert_array_equal(left.labels(), right.labels())


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FIRST_PAUSE", 0.01)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(corpus: Corpus) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(corpus.folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("form", ["pipe:cat {root}/{{}}", "file:{root}"])
def test_urls_give_the_same_batches(corpus: Corpus, tmp_path: Path, form: str) -> None:
    url = form.format(root=corpus.folder)
    assert_same_batches(stream(str(corpus.folder), tmp_path), stream(url, tmp_path))


@pytest.mark.skipif(shutil.which("curl") is None, reason="webdataset opens http with curl")
def test_http(corpus: Corpus, tmp_path: Path, served: str) -> None:
    assert_same_batches(stream(str(corpus.folder), tmp_path), stream(served, tmp_path))


def test_the_cache_is_bounded(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a shard arrives, which counts in full from the beginning."""
    copy = sources.copy

    def watched(address: str, part: Path) -> None:
        assert sum(path.stat().st_size for path in tmp_path.rglob("*shard-*.tar*")) <= bound
        copy(address, part)

    monkeypatch.setattr(sources, "copy", watched)
    url = f"file:{corpus.folder}"
    largest = max(int(one["bytes"]) for one in corpus.split("train").index.shards)
    bound = 3 * largest
    small = stream(url, tmp_path, cache_gb=bound / 1e9)
    whole = stream(str(corpus.folder), tmp_path)
    for step in range(STEPS):
        np.testing.assert_array_equal(small.batch(step).input_ids, whole.batch(step).input_ids)
        assert sum(path.stat().st_size for path in tmp_path.rglob("shard-*.tar")) <= bound
    assert not list(tmp_path.rglob("*.part"))
    assert not list(tmp_path.rglob("*.lock"))
    config = DataConfig(mixture={"a": SourceConfig(url), "b": SourceConfig(url)}, cache_gb=1.0)
    config.cache_dir = str(tmp_path)
    assert [one.cache_bytes for one in open_corpora(config).values()] == [5e8, 5e8]


def test_the_cache_of_another_user_is_read(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who owns a file, or may write it, can set its time of use."""

    def refuse(path: Path, times: None = None) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr("data_pipeline.shards.sources.os.utime", refuse)
    assert_same_batches(
        stream(str(corpus.folder), tmp_path), stream(f"file:{corpus.folder}", tmp_path)
    )


def test_a_size_of_copies_that_are_not_made_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^stage_gb: is for stage; set that too, or remove it$"):
        DataConfig(path="corpus", stage_gb=9.0)


def test_what_a_process_that_died_leaves_behind_is_in_nobody_s_way(
    corpus: Corpus, tmp_path: Path
) -> None:
    url = f"file:{corpus.folder}"
    folder = Corpus.open(url, str(tmp_path)).folder / "train"
    for number in range(3):
        (folder / f".shard-{number:06d}.tar.lock").touch()
        (folder / f".shard-{number:06d}.tar.99999.part").write_bytes(b"begun")
    assert_same_batches(stream(str(corpus.folder), tmp_path), stream(url, tmp_path))
    assert not list(tmp_path.rglob("*.part"))


def test_a_file_system_without_locks_will_do(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre mounted without ``-o flock``."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    url = f"file:{corpus.folder}"
    folder = Corpus.open(url, str(tmp_path)).folder / "train"
    at_work = folder / ".shard-000000.tar.other-1.part"
    at_work.write_bytes(b"begun")
    assert_same_batches(stream(str(corpus.folder), tmp_path), stream(url, tmp_path))
    assert at_work.exists(), "another rank's"
    path = folder / "shard-000000.tar"
    assert unfinished_name(path) != unfinished_name(path), "of containers alike in host and pid"
    assert not list(tmp_path.rglob("*.lock"))


def _read_everything(url: str, cache: str, bound: float, queue) -> None:
    split = Corpus.open(url, cache, bound).split("train")
    queue.put(sum(int(split.read_block(n).tokens.sum()) for n in range(len(split.index.blocks))))


@pytest.mark.slow
def test_ranks_share_a_small_cache(corpus: Corpus, tmp_path: Path) -> None:
    split = corpus.split("train")
    expected = sum(int(split.read_block(n).tokens.sum()) for n in range(len(split.index.blocks)))
    bound = 3.5 * max(int(one["bytes"]) for one in split.index.shards) / 1e9
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = (f"file:{corpus.folder}", str(tmp_path), bound, queue)
    readers = [context.Process(target=_read_everything, args=arguments) for _ in range(2)]
    for reader in readers:
        reader.start()
    found = [queue.get(timeout=60) for _ in readers]
    for reader in readers:
        reader.join(60)
    assert found == [expected] * 2


def test_what_fails_at_first_is_tried_again(
    corpus: Corpus, tmp_path: Path, quick_retries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is truncated once, which its size and SHA-256, or the pipe, reveal."""
    copy, tried = sources.copy, set()

    def flaky(address: str, part: Path) -> None:
        copy(address, part)
        if address.endswith(".tar") and address not in tried:
            tried.add(address)
            part.write_bytes(part.read_bytes()[:-7])

    monkeypatch.setattr(sources, "copy", flaky)
    url = f"file:{corpus.folder}"
    assert_same_batches(stream(str(corpus.folder), tmp_path), stream(url, tmp_path))
    assert tried


def test_what_cannot_be_had_is_named(
    corpus: Corpus, tmp_path: Path, quick_retries, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="nowhere"):
        stream(f"file:{tmp_path}/nowhere", tmp_path / "cache")
    copied = tmp_path / "corpus"
    shutil.copytree(corpus.folder, copied)
    (copied / "train" / "shard-000001.tar").write_bytes(b"rubbish")
    with pytest.raises(BadShard, match=r"shard-000001\.tar: cannot be fetched after 5 attempts"):
        [stream(f"file:{copied}", tmp_path / "cache").batch(step) for step in range(STEPS)]
    skipping = stream(f"file:{copied}", tmp_path / "cache", on_bad_shard="skip")
    assert not all(skipping.batch(step).readable.all() for step in range(STEPS))
    monkeypatch.setattr(sources, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(sources, "ATTEMPTS", 2)
    with pytest.raises(BadShard, match=r"pipe:sleep.*stalled: no data for 0.2 s"):
        Corpus.open("pipe:sleep 30; echo {}", str(tmp_path / "stalled"))
    with pytest.raises(BadShard, match=r"after 2 attempts: the command has ended with status 3$"):
        Corpus.open("pipe:echo {}; exit 3", str(tmp_path / "failed"))
    with pytest.raises(BadShard, match=r"after 2 attempts: curl has ended with status 7$"):
        Corpus.open("http://127.0.0.1:1", str(tmp_path / "refused"))


def test_mixtures(corpus: Corpus, make_corpus, tmp_path: Path) -> None:
    from tests.data_pipeline.conftest import make_documents

    other = make_corpus(make_documents(60, 77))
    config = DataConfig(
        sequence_length=64,
        mixture={
            "big": SourceConfig(str(corpus.folder), 3.0),
            "small": SourceConfig(str(other.folder), 1.0),
        },
    )
    whole = BatchStream.open(config, "train", 1, 16)
    ranks = [BatchStream.open(config, "train", 1, 16, rank, 4) for rank in range(4)]
    seen: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for step in range(60):
        batch = whole.batch(step)
        source = batch.sample_ids >> 48
        assert (source == 1).sum() == 4
        parts = [rank.batch(step) for rank in ranks]
        np.testing.assert_array_equal(
            np.concatenate([part.input_ids for part in parts]), batch.input_ids
        )
        assert all(((part.sample_ids >> 48) == 1).sum() == 1 for part in parts)
        for number in (0, 1):
            mine = source == number
            seen[number] += zip(
                batch.epochs[mine].tolist(), batch.sample_ids[mine].tolist(), strict=True
            )
    for samples in seen.values():
        assert len(set(samples)) == len(samples)
    assert seen[1][-1][0] > seen[0][-1][0]  # the small corpus is in a later epoch
    with pytest.raises(DataError, match="none of 3 rows"):
        rows_of_sources([100.0, 1.0], 3)


def test_rows_follow_the_weights_and_are_spread_over_the_batch() -> None:
    """The rows that are left go to the largest remainders."""
    assert rows_of_sources([2.0, 1.0], 4).tolist() == [0, 0, 1, 0]
    assert rows_of_sources([5.0, 3.0, 2.0], 6).tolist() == [0, 1, 0, 2, 1, 0]
    assert np.bincount(rows_of_sources([0.31, 0.0, 0.27, 0.42], 64)).tolist() == [20, 0, 17, 27]


def test_a_mixture_of_vocabularies_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    copied = tmp_path / "corpus"
    shutil.copytree(corpus.folder, copied)
    tree = manifest.read(copied)
    tree["vocabulary"]["fingerprint"] = "0" * 64
    (copied / "corpus.json").write_text(manifest.render(tree))
    sources_ = {"a": SourceConfig(str(corpus.folder)), "b": SourceConfig(str(copied))}
    with pytest.raises(DataError, match="another vocabulary"):
        BatchStream.open(DataConfig(sequence_length=64, mixture=sources_), "train", 1, 8)
    with pytest.raises(DataError, match=r"data\.path: must be set"):
        BatchStream.open(DataConfig(), "train", 1, 8)


def test_a_damaged_index_is_fetched_again_or_refused(
    corpus: Corpus, tmp_path: Path, quick_retries: None
) -> None:
    """In the cache it is fetched again; at its source it is refused by name."""
    copied, cache = tmp_path / "corpus", tmp_path / "cache"
    shutil.copytree(corpus.folder, copied)
    url = f"file:{copied}"
    folder = Corpus.open(url, str(cache)).folder
    for name in ("train/blocks.npy", "word_starts.npy", "tokenizer/tokenizer.json"):
        for damage in damages((folder / name).read_bytes(), flips=1):
            if not damage.is_folder:
                damage.inflict(folder / name)
                Corpus.open(url, str(cache))
                assert (folder / name).read_bytes() == (copied / name).read_bytes()
    assert_same_batches(stream(str(corpus.folder), cache), stream(url, cache))
    flipped = next(one for one in damages(b"x" * 99) if "flipped" in one.name)
    flipped.inflict(copied / "word_starts.npy")
    with pytest.raises(DataError, match=r"word_starts\.npy: cannot be .* received \d+ bytes"):
        Corpus.open(url, str(tmp_path / "other"))
