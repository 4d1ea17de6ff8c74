"""Reading and writing tensor files, without executing code in them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from model.errors import ModelError

_SINGLE = ("model.safetensors", "pytorch_model.bin")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, single-file or sharded; .safetensors is preferred.

    A .bin is read with ``weights_only``: a pickle that holds anything but tensors is refused.
    """
    for name in _SINGLE:
        if (folder / name).is_file():
            return read_tensors(folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _read_shards(folder, index)
    raise ModelError(
        f"{folder}: has neither {' nor '.join(_SINGLE)}; export or download the weights"
    )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file. Raises ModelError, naming it, if it holds anything but tensors."""
    try:
        path.open("rb").close()  # says "Permission denied", where the library says "No such file"
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{path}: refused: it holds more than tensors; convert it to safetensors"
        ) from error
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or _first_line(error)}") from error
    except Exception as error:  # on random bytes the unpickler can raise any exception
        raise ModelError(f"{path}: not a readable tensor file ({_first_line(error)})") from error
    if not isinstance(state, dict) or not all(map(_is_entry, state.items())):
        raise ModelError(f"{path}: expected a mapping from names to tensors")
    return state


def write_tensors(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write contiguous copies as safetensors, with the metadata `transformers` looks for.

    The file follows the umask, so that others may read it. Raises OSError, also where the library
    has an exception of its own, as for a full disk.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)  # the library replaces the file by one that only its owner can read
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name}: {_first_line(error)}") from error


def _read_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ModelError(f"{index}: not a weight index") from error
    state: dict[str, Tensor] = {}
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(f"{index}: {shard!r} points outside the folder")
        state.update(read_tensors(folder / shard))
    return state


def _is_entry(entry: tuple[object, object]) -> bool:
    name, tensor = entry
    return isinstance(name, str) and isinstance(tensor, Tensor)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
