"""The files are plain safetensors, and every number is in exactly one of them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from trainer.checkpoint.folder import (
    _SAFETENSORS,
    safetensors_chunks,
    safetensors_header,
    write_durably,
)
from trainer.checkpoint.layout import FROZEN, Piece, decode_scalar, encode_scalar, share


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {str(dtype): (torch.rand(5) * 9).to(dtype) for dtype in _SAFETENSORS}
    header = safetensors_header({name: (t.dtype, t.numel()) for name, t in tensors.items()})
    data = torch.cat([tensor.view(torch.uint8) for tensor in tensors.values()])
    stored = write_durably(tmp_path, "some.safetensors", safetensors_chunks(header, data))
    read = load_file(tmp_path / "some.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    content = (tmp_path / "some.safetensors").read_bytes()
    assert (stored.bytes, stored.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_a_file_without_tensors_is_valid(tmp_path: Path) -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    write_durably(tmp_path, "empty", safetensors_chunks(safetensors_header({}), nothing))
    assert load_file(tmp_path / "empty") == {}


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    write_durably(tmp_path, "one", [b"first"])
    with pytest.raises(FileExistsError):
        write_durably(tmp_path, "one", [b"second"])


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 9))
def test_replicated_tensors_are_stored_once(sizes: list[int], world_size: int) -> None:
    whole = [
        Piece(f"p{i}", (size,), FROZEN, torch.empty(size), 0, 0, size, replicated=True)
        for i, size in enumerate(sizes)
    ]
    stored = [piece for rank in range(world_size) for piece in share(whole, rank, world_size)]
    elements = [(piece.name, piece.start + i) for piece in stored for i in range(piece.numel)]
    assert elements == [(f"p{i}", at) for i, size in enumerate(sizes) for at in range(size)]
    shares = [sum(p.numel for p in share(whole, rank, world_size)) for rank in range(world_size)]
    assert max(shares) - min(shares) <= 1


def test_a_share_of_a_flat_tensor_is_read_from_its_place() -> None:
    flat = torch.arange(10.0)
    late = Piece("late", (6,), 0, flat, 4, 0, 6, replicated=True)
    one, two = (share([late], rank, 2)[0] for rank in range(2))
    assert one.of(flat).tolist() == [4, 5, 6]
    assert two.of(flat).tolist() == [7, 8, 9]


def test_partitions_are_stored_where_they_are() -> None:
    held = Piece("p", (10,), 0, torch.empty(4), 1, 6, 3, replicated=False)
    elsewhere = Piece("q", (10,), 0, torch.empty(4), 0, 0, 0, replicated=False)
    assert share([held, elsewhere], rank=1, world_size=2) == [held]


@pytest.mark.parametrize("value", [3, 0.1, None, True, "x"])
def test_scalars_come_back_as_they_were(value: object) -> None:
    assert decode_scalar(encode_scalar(value), torch.device("cpu")) == value


def test_a_scalar_tensor_keeps_its_type_and_is_fresh() -> None:
    step = torch.tensor(3.0, dtype=torch.float64)
    encoded = encode_scalar(step)
    one, two = (decode_scalar(encoded, torch.device("cpu")) for _ in range(2))
    one += 1
    assert (one, two) == (4, 3)
    assert two.dtype == torch.float64
