"""A folder's tensor files, read without executing code in them, and checks of their tensors."""

import dataclasses
import json
import pickle
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from model.errors import ModelError
from model.initialisation import skeleton
from model.model_config import ModelConfig

_SINGLE = ("model.safetensors", "pytorch_model.bin")


def has_weights(folder: Path) -> bool:
    """Whether a folder holds the tensors of a model."""
    names = (*_SINGLE, *(f"{name}.index.json" for name in _SINGLE))
    return any((folder / name).is_file() for name in names)


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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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


Config = TypeVar("Config", bound=ModelConfig)
_MAX_SHARED_LAYERS = 1024  # a model can have more layers than tensors only by sharing
_PROJECTION = re.compile(r"(?:.*\.)?(?:decoder|\w*lm_head|vocab_projector)\.(weight|bias)")
_LAYERS = ("num_hidden_layers", "n_layers", "layers")
_NETWORKS = ("num_feedforward_networks", "feed_forwards")


def refuse_implausible_depth(theirs: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Refuse huge layer counts before anything is allocated for them."""
    layers, networks = _largest(theirs, _LAYERS), _largest(theirs, _NETWORKS)
    if layers * networks > max(len(weights), _MAX_SHARED_LAYERS):
        raise ModelError(
            f"the configuration says {layers} layers of {networks} feed-forward networks each, "
            f"the weights have fewer"
        )


def refuse_extra_weights(
    config: Config, weights: Container[str], names: Callable[[Config], Iterable[str]]
) -> None:
    """Raise ModelError if the weights have more layers or networks than the configuration."""
    expected = set(names(config))
    keys = {field.name for field in dataclasses.fields(config)}
    for key in sorted(keys & {"layers", "feed_forwards"}, reverse=True):
        larger = dataclasses.replace(config, **{key: getattr(config, key) + 1})
        try:
            of_larger = names(larger)
        except ModelError:
            continue  # the family allows only one network per layer
        for name in of_larger:
            if name not in expected and name in weights:
                raise ModelError(
                    f"{key}: the configuration says {getattr(config, key)}, but the weights have "
                    f"more: {name}"
                )


def other_projection(state: Mapping[str, Tensor], unread: Mapping[str, Tensor]) -> str:
    """A note about a bias of the vocabulary projection besides the one in `state`; "" for none.

    Checkpoints may repeat the tied weight and the bias. Some are from before `transformers` tied
    the biases, so that only one was trained. Raises ModelError for another weight.
    """
    tied = {"weight": state["embeddings.word.weight"], "bias": state.get("head.bias")}
    note = ""
    for name, tensor in unread.items():
        match = _PROJECTION.fullmatch(name)
        ours = None if match is None else tied[match[1]]
        if ours is None or torch.equal(tensor, ours):
            continue
        if name.endswith("weight"):
            raise ModelError(
                f"tie_word_embeddings: {name} differs from what it is tied to; remove it from the "
                "checkpoint; a frozen teacher may have it with model: {kind: transformers}"
            )
        note = f"{name} differs from the bias that it is tied to, and is not read"
    return note


def _largest(theirs: Mapping[str, Any], keys: Sequence[str]) -> float:
    """The largest number under any of these keys, at least 1."""
    return max([1, *(theirs[key] for key in keys if isinstance(theirs.get(key), (int, float)))])


def tensor_names(config: ModelConfig) -> list[str]:
    """The names of all tensors of a model with this configuration."""
    return list(skeleton(config).state_dict())


def checked_state(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state in float32. Raises ModelError if names, shapes or values do not fit."""
    expected = skeleton(config).state_dict()
    for name, tensor in expected.items():
        if name not in state:
            raise ModelError(f"the weights have no {name}")
        if not _is_plain(state[name]):
            raise ModelError(
                f"{name} is {state[name].dtype}, {state[name].layout}; "
                f"import the weights unquantised and dense"
            )
        if state[name].shape != tensor.shape:
            raise ModelError(
                f"{name} has shape {tuple(state[name].shape)}, "
                f"the configuration says {tuple(tensor.shape)}"
            )
    checked = {name: state[name].to(torch.float32) for name in expected}
    for name, tensor in checked.items():
        if not tensor.isfinite().all():
            raise ModelError(f"{name} holds NaN or infinity; its training or conversion failed")
    return checked


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is dense, floating-point and in memory."""
    return tensor.is_floating_point() and tensor.layout == torch.strided and not tensor.is_meta
