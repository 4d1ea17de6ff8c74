"""Kinds of models, their heads, and import from and export to `transformers`.

A `ModelConfig` describes an architecture: an `EncoderConfig`, the family that `transformers`
shares, or another kind (`model.kinds`). `build` makes a `Model` with initial weights.
`from_pretrained` and `save_pretrained` import and export it. Training uses `Model.features` and
`output_projection`; other callers call the model itself.
"""

import os

import torch

import model.head_modules
import model.kinds  # noqa: F401 - registers them
from model.accounting import ModelSize, describe
from model.config import EncoderConfig
from model.documents import AttentionMask, Documents, Padded
from model.errors import ModelError
from model.generation import Decoding, beam_search, greedy_search
from model.heads import Transitions, decode, log_likelihood, vocabulary_logits
from model.hugging_face.conversion import (
    first_weights,
    with_fitting_heads,
    with_head_alone,
    with_task_head,
)
from model.hugging_face.files import require_free, written_whole
from model.hugging_face.folder import (
    encoder_from_pretrained,
    from_pretrained,
    import_folder,
    longest_text,
    prune_folder,
    read_config,
    read_encoder_config,
    save_pretrained,
    write_config,
)
from model.initialisation import build
from model.layer_selection import cannot_tile, double_layers, select_layers, select_tokens, tile
from model.masked_language_model import MaskedLanguageModel
from model.model_card import Training, model_card
from model.model_config import HEAD_NAMES, Ability, ModelConfig, ModelShape, may_name_a_head
from model.protocol import (
    HEADS,
    QKV,
    READ_OUT,
    Capture,
    Features,
    Model,
    ModelOutput,
    default_model,
    module_of,
)
from model.task_head_config import (
    CHOICE,
    CLASSIFICATION,
    DETECTION,
    MULTI_LABEL,
    OTHER,
    REGRESSION,
    SPAN,
    TAGGING,
    VECTOR,
    HeadModuleConfig,
    TaskHeadConfig,
)

# DeepSpeed, which `transformers` imports too, would print that it had to guess. A value from before
# may be that of a login node without GPUs, whose environment sbatch hands on to the ranks.
# `torch.cuda.is_available` would initialise CUDA, and `device: cpu` would come too late.
os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.device_count() else "cpu"

__all__ = [
    "CHOICE",
    "CLASSIFICATION",
    "DETECTION",
    "HEADS",
    "HEAD_NAMES",
    "MULTI_LABEL",
    "OTHER",
    "QKV",
    "READ_OUT",
    "REGRESSION",
    "SPAN",
    "TAGGING",
    "VECTOR",
    "Ability",
    "AttentionMask",
    "Capture",
    "Decoding",
    "Documents",
    "EncoderConfig",
    "Features",
    "HeadModuleConfig",
    "MaskedLanguageModel",
    "Model",
    "ModelConfig",
    "ModelError",
    "ModelOutput",
    "ModelShape",
    "ModelSize",
    "Padded",
    "TaskHeadConfig",
    "Training",
    "Transitions",
    "beam_search",
    "build",
    "cannot_tile",
    "decode",
    "default_model",
    "describe",
    "double_layers",
    "encoder_from_pretrained",
    "first_weights",
    "from_pretrained",
    "greedy_search",
    "import_folder",
    "log_likelihood",
    "longest_text",
    "may_name_a_head",
    "model_card",
    "module_of",
    "prune_folder",
    "read_config",
    "read_encoder_config",
    "require_free",
    "save_pretrained",
    "select_layers",
    "select_tokens",
    "tile",
    "vocabulary_logits",
    "with_fitting_heads",
    "with_head_alone",
    "with_task_head",
    "write_config",
    "written_whole",
]
