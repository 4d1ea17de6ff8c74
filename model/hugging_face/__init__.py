"""Reading and writing `transformers` folders: config.json, model.safetensors, tokenizer files.

Each architecture is one `Family`, which maps its configuration and tensor names to ours. A model
that `transformers` cannot express is saved in Tandem's own format (``model_type: tandem``): the
same files, with the keys of its `ModelConfig` and our tensor names.
"""

from model.hugging_face.conversion import (
    first_weights,
    with_fitting_heads,
    with_head_alone,
    with_task_head,
)
from model.hugging_face.folder import (
    encoder_from_pretrained,
    from_pretrained,
    import_folder,
    prune_folder,
    read_config,
    read_encoder_config,
    require_free,
    save_pretrained,
    write_config,
    written_whole,
)

__all__ = [
    "encoder_from_pretrained",
    "first_weights",
    "from_pretrained",
    "import_folder",
    "prune_folder",
    "read_config",
    "read_encoder_config",
    "require_free",
    "save_pretrained",
    "with_fitting_heads",
    "with_head_alone",
    "with_task_head",
    "write_config",
    "written_whole",
]
