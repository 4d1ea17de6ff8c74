"""Kinds of models, their heads, and import from and export to `transformers`.

A `ModelConfig` describes an architecture: an `EncoderConfig`, the family that `transformers`
shares, or another kind (`model.kinds`). `build` makes a `Model` with initial weights.
`from_pretrained` and `save_pretrained` import and export it. Training uses `Model.features` and
`output_projection`; other callers call the model itself.
"""

# ruff: noqa: F401 - what this package imports, it hands on

import model.head_modules
import model.kinds  # registers them
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
from model.outputs import QKV, Capture, Features, ModelOutput
from model.protocol import HEADS, READ_OUT, Model, default_model, module_of
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
