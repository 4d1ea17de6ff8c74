"""One family of encoders, its heads, and import from and export to `transformers`.

An `EncoderConfig` describes an architecture. `build` makes a model with initial weights.
`from_pretrained` and `save_pretrained` import and export it. Training uses
`MaskedLanguageModel.features` and `output_projection`; other callers call the model itself.
"""

from model.accounting import ModelSize, describe
from model.attention import QKV
from model.config import EncoderConfig, ModelError
from model.crf import Transitions, decode, log_likelihood
from model.encoder import Capture
from model.hugging_face import (
    from_pretrained,
    import_folder,
    read_config,
    require_free,
    save_pretrained,
    with_task_head,
    write_config,
)
from model.initialisation import build
from model.layer_selection import double_layers, select_layers
from model.masked_language_model import Features, MaskedLanguageModel, ModelOutput
from model.model_card import Training, model_card
from model.protocol import Model, ModelShape
from model.task_head_config import (
    CHOICE,
    CLASSIFICATION,
    REGRESSION,
    SPAN,
    TAGGING,
    VECTOR,
    TaskHeadConfig,
)

__all__ = [
    "CHOICE",
    "CLASSIFICATION",
    "QKV",
    "REGRESSION",
    "SPAN",
    "TAGGING",
    "VECTOR",
    "Capture",
    "EncoderConfig",
    "Features",
    "MaskedLanguageModel",
    "Model",
    "ModelError",
    "ModelOutput",
    "ModelShape",
    "ModelSize",
    "TaskHeadConfig",
    "Training",
    "Transitions",
    "build",
    "decode",
    "describe",
    "double_layers",
    "from_pretrained",
    "import_folder",
    "log_likelihood",
    "model_card",
    "read_config",
    "require_free",
    "save_pretrained",
    "select_layers",
    "with_task_head",
    "write_config",
]
