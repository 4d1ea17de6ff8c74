"""The classes of `transformers` for a config.json, their models, and its errors in one line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from model.errors import ModelError
from model.hugging_face.task_heads import ENDINGS, VECTOR_KEY, linear, read_task_heads
from model.task_head_config import CLASSIFICATION, TAGGING, TaskHeadConfig

PROBED = 7  # tokens of a trial pass
_CLASSES = {ENDINGS[CLASSIFICATION]: "first", ENDINGS[TAGGING]: ""}  # and what the head reads


def architecture(theirs: Mapping[str, Any]) -> str:
    """The name of the class that wrote the folder."""
    return str((theirs.get("architectures") or ["AutoModel"])[0])


def is_masked_lm(theirs: Mapping[str, Any]) -> bool:
    """Whether the folder holds a masked language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as names

    return VECTOR_KEY not in theirs and bool(
        names.get(theirs.get("model_type")) == architecture(theirs)
    )


def task_heads_in(theirs: Mapping[str, Any]) -> dict[str, TaskHeadConfig]:
    """The head of a model that labels texts or tokens, or makes vectors of texts."""
    if VECTOR_KEY in theirs:
        return read_task_heads(theirs, (), {})
    name = architecture(theirs)
    pooling = next((read for ending, read in _CLASSES.items() if name.endswith(ending)), None)
    if pooling is None:
        return {}
    form = linear("logits", pooling)
    heads = read_task_heads(theirs, [form.weight], dict.fromkeys(ENDINGS, form))
    return {name: replace(head, pooling=pooling) for name, head in heads.items()}


def auto_class(theirs: Mapping[str, Any]) -> Any:
    """The class of `transformers` that reads the folder."""
    import transformers

    ending = next((name for name in _CLASSES if architecture(theirs).endswith(name)), "")
    if VECTOR_KEY in theirs:
        ending = ""
    if is_masked_lm(theirs):
        ending = "ForMaskedLM"
    return getattr(transformers, f"AutoModel{ending}")


def config_class(theirs: Mapping[str, Any]) -> Any:
    """The class of its configuration."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[theirs["model_type"]]


def name_once(module: nn.Module, copy: bool) -> dict[Tensor | None, str]:
    """Leave each shared parameter one name, as checkpoints do; returns the names.

    With `copy` the other names get copies: ZeRO 3 gathers parameters for the modules that own them.
    """
    names: dict[Tensor | None, str] = {
        parameter: name for name, parameter in module.named_parameters()
    }
    for name, parameter in [*module.named_parameters(remove_duplicate=False)]:
        if names[parameter] != name:
            place, _, key = name.rpartition(".")
            owner = module.get_submodule(place)
            del owner._parameters[key]
            if copy:
                owner.register_parameter(key, nn.Parameter(parameter.detach().clone()))
                continue
            object.__setattr__(owner, key, parameter)
    return names


def forget_positions(module: nn.Module) -> None:
    """Keep numbers of positions and the like, which are no weights, out of the state."""
    for part in module.modules():
        counts = [
            name
            for name, of in part._buffers.items()
            if of is not None and not of.is_floating_point()
        ]
        part._non_persistent_buffers_set.update(counts)


def longest_sequence(original: nn.Module) -> int | None:
    """The longest sequence; some families count positions from the padding token's number on."""
    for name, table in original.named_modules():
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            padding = table.padding_idx
            return table.num_embeddings - (0 if padding is None else padding + 1)
    positions: int = getattr(original.config, "max_position_embeddings", None) or 0
    return positions if positions > 0 else None  # XLNet's is -1


def probed(vocabulary: int) -> dict[str, Any]:
    """The inputs of a trial pass."""
    ids = torch.arange(PROBED)[None] % vocabulary
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def probe(original: Any, theirs: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """The last states, and all outputs, of the library's own model in a trial pass.

    Raises ModelError where it fails.
    """
    known = original.config
    try:
        with library_errors(theirs):
            given = probed(known.vocab_size)
            last = original.base_model(**given, return_dict=True).last_hidden_state
            return last, original(**given, output_hidden_states=True, return_dict=True)
    except ModelError as error:
        if getattr(known, "pad_token_id", None) is not None:
            raise
        raise ModelError(
            "pad_token_id: config.json has none; set it to the tokenizer's padding token"
        ) from error


@contextmanager
def library_errors(theirs: Mapping[str, Any]) -> Iterator[None]:
    """Raise ModelError, one line, for what the library cannot read or does not have."""
    try:
        with _quiet():
            yield
    except ImportError as error:
        raise ModelError(
            f"model_type: {theirs.get('model_type')!r} needs {error.name or 'transformers'}: "
            "pip install 'tandem-distill[hf]'"
        ) from error
    except Exception as error:  # its checks of a config raise exceptions of many kinds
        why = " ".join(str(error).split())[:300]
        raise ModelError(f"transformers cannot read it: {why}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's progress bars and warnings."""
    from transformers.utils import logging

    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
