"""Reads what Weights & Biases wrote offline, from its own records."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768


def records(path: Path) -> Iterator[Any]:
    """The protobuf records of a ``.wandb`` file: LevelDB log framing after a 7-byte header."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    offset, pending = 7, b""
    while offset + 7 <= len(content):
        if BLOCK - offset % BLOCK < 7:
            offset += BLOCK - offset % BLOCK
            continue
        length, kind = struct.unpack("<HB", content[offset + 4 : offset + 7])
        pending += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pending)
            pending = b""
            yield record


def offline_folder(run: Path) -> Path:
    (folder,) = (run / "wandb").glob("offline-run-*")
    return folder


def history(run: Path) -> dict[int, dict[str, Any]]:
    """Step -> logged values in W&B's file; fails if a step occurs twice."""
    rows = {}
    for record in records(next(offline_folder(run).glob("run-*.wandb"))):
        if record.HasField("history"):
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            assert values["_step"] not in rows
            rows[values["_step"]] = values
    return rows
