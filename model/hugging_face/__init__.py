"""Models as `transformers` folders: config.json, model.safetensors, tokenizer files.

Each architecture is one `Family`: how its configuration and tensor names correspond to ours. What
`transformers` cannot express is saved in our own form (``model_type: tandem``): the same files,
with EncoderConfig's keys and our tensor names.
"""

from model.hugging_face.folder import from_pretrained, require_free, save_pretrained
from model.hugging_face.importing import import_folder, write_config

__all__ = ["from_pretrained", "import_folder", "require_free", "save_pretrained", "write_config"]
