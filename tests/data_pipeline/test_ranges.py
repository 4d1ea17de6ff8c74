"""Corpora on a web server that sends parts of files: the same batches, and only what is read."""

from __future__ import annotations

import functools
import http.server
import itertools
import re
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest

from data_pipeline import BadShard, BatchStream, Corpus, DataConfig, DataError
from data_pipeline.reading.staging import Stager
from data_pipeline.shards import sources
from data_pipeline.shards.index import shard_name
from data_pipeline.shards.ranges import Ranged, Staged, serves_ranges
from data_pipeline.shards.sources import Remote
from tests.waiting import until

STEPS = 30


class Server(http.server.SimpleHTTPRequestHandler):
    """Python's own server, which sends whole files, and here parts of them as well."""

    parts: ClassVar[list[tuple[str, int, int]]]  # path, first byte and size of what was sent
    fails: ClassVar[list[str]]  # how to answer next requests of parts: "cut", "503", "404"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return super().do_GET()
        fault = self.fails.pop(0) if self.fails else ""
        if fault.isdigit():
            return self.send_error(int(fault))
        first, last = map(int, wanted.groups())
        whole = Path(self.translate_path(self.path)).read_bytes()
        part = whole[first : last + 1]
        if not part:
            return self.send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
        self.parts.append((self.path, first, len(part)))
        self.send_response(HTTPStatus.PARTIAL_CONTENT)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(whole)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part[: len(part) // 2] if fault == "cut" else part)


@pytest.fixture
def server(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sources, "FIRST_PAUSE", 0.001)
    Server.parts, Server.fails = [], []
    handler = functools.partial(Server, directory=str(corpus.folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


def stream(path: str, cache: Path, staged: Path | None = None) -> BatchStream:
    config = DataConfig(path=path, sequence_length=64, cache_dir=str(cache))
    return BatchStream.open(config, "train", 3, 6, staged=staged)


def test_only_the_blocks_that_are_read_are_sent(corpus: Corpus, tmp_path: Path, server) -> None:
    plain, ours = stream(str(corpus.folder), tmp_path), stream(server, tmp_path)
    for step in range(STEPS):
        np.testing.assert_array_equal(ours.batch(step).input_ids, plain.batch(step).input_ids)
    assert not list(tmp_path.rglob("shard-*")), "nothing is cached"
    index = corpus.split("train").index
    first, *sent = (one for one in Server.parts if "/train/shard-" in one[0])
    assert first[1:] == (0, 1), "the question whether parts are sent"
    blocks = {
        (f"/train/{shard_name(index.shard_of(number))}", int(one["offset"]), int(one["bytes"]))
        for number, one in enumerate(index.blocks)
    }
    assert set(sent) < blocks
    assert len(set(sent)) == len(sent) > 0


def test_copies_on_the_nodes_disk_are_made_from_the_server(
    corpus: Corpus, tmp_path: Path, server
) -> None:
    """`data.stage`, whose copies are all made before the first batch is read."""
    folder = tmp_path / "staged"
    plain = stream(str(corpus.folder), tmp_path)
    ours, ahead = (stream(server, tmp_path, folder) for _ in range(2))
    blocks = list(zip(range(STEPS), ahead.blocks_entered(0), strict=False))
    entered = {number for _, some in blocks for _, number in some}
    nothing_more = ((step, []) for step in itertools.count(STEPS))
    with Stager(folder, itertools.chain(blocks, nothing_more), 10**9, -1):
        until(lambda: len(list(folder.rglob("shard-*.tar.*[0-9]"))) == len(entered))
        before = len(Server.parts)
        for step in range(STEPS):
            np.testing.assert_array_equal(ours.batch(step).input_ids, plain.batch(step).input_ids)
        assert len(Server.parts) == before


@pytest.mark.parametrize("fault", ["cut", "503", "429"])
def test_what_fails_at_first_is_asked_again(corpus: Corpus, tmp_path: Path, server, fault) -> None:
    split = Corpus.open(server, str(tmp_path)).split("train")
    Server.fails += [fault] * 2
    assert (split.read_block(1).tokens == corpus.split("train").read_block(1).tokens).all()
    assert not Server.fails


def test_what_cannot_be_had_is_named(corpus: Corpus, tmp_path: Path, server) -> None:
    split = Corpus.open(server, str(tmp_path)).split("train")
    Server.fails += ["503"] * sources.ATTEMPTS
    with pytest.raises(BadShard, match=r"^http:.*shard-000000\.tar: cannot be read: .* 503"):
        split.read_block(0)
    Server.fails += ["404"]
    with pytest.raises(BadShard, match=r"cannot be read: .* 404"):
        split.read_block(0)
    end = int(split.index.shards["bytes"][0])
    assert split.shards.read("shard-000000.tar", end, 10) == b""
    assert len(split.shards.read("shard-000000.tar", end - 3, 10)) == 3


def test_which_servers_send_parts(corpus: Corpus, tmp_path: Path, server, monkeypatch) -> None:
    split = Corpus.open(server, str(tmp_path)).split("train")
    assert isinstance(split.shards, Ranged)
    assert isinstance(split.staged_in(tmp_path).shards, Staged)
    assert not serves_ranges(f"file:{corpus.folder}/train/shard-000000.tar")
    assert not serves_ranges(server.replace("//", "//user:word@") + "/train/shard-000000.tar")
    monkeypatch.setattr(Server, "do_GET", http.server.SimpleHTTPRequestHandler.do_GET)
    with pytest.raises(BadShard, match="the server sends whole files only"):
        split.read_block(0)
    serves_ranges.cache_clear()
    whole = Corpus.open(server, str(tmp_path)).split("train")
    assert isinstance(whole.shards, Remote)
    assert whole.staged_in(tmp_path) is whole


def test_a_store_sends_parts_through_fsspec(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "FIRST_PAUSE", 0.001)
    system, url = fsspec.filesystem("memory"), "memory://corpora/mine"
    for file in filter(Path.is_file, corpus.folder.rglob("*")):
        system.pipe_file(f"/corpora/mine/{file.relative_to(corpus.folder)}", file.read_bytes())
    plain, ours = stream(str(corpus.folder), tmp_path), stream(url, tmp_path, tmp_path / "staged")
    for step in range(3):
        np.testing.assert_array_equal(ours.batch(step).input_ids, plain.batch(step).input_ids)
    assert not list(tmp_path.rglob("shard-*")), "nothing is cached"
    split = Corpus.open(url, str(tmp_path)).split("train")
    assert isinstance(split.shards, Ranged)
    end = int(split.index.shards["bytes"][0])
    assert len(split.shards.read("shard-000000.tar", end - 3, 10)) == 3
    system.rm("/corpora", recursive=True)
    with pytest.raises(BadShard, match=r"memory://.*shard-000000.tar: cannot be read"):
        split.read_block(0)
    for missing, why in [
        ("s3://a/b", "Install s3fs"),
        ("memory://nowhere", "/nowhere/corpus.json"),
    ]:
        with pytest.raises(DataError, match=f"{missing}/corpus.json: cannot be fetched: .*{why}"):
            Corpus.open(missing, str(tmp_path))
