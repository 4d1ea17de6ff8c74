"""A foreign checkpoint becomes a teacher or a student."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import yaml

from model.config import EncoderConfig
from model.hugging_face.folder import (
    TOKENIZER_FILES,
    from_pretrained,
    require_free,
    save_pretrained,
    special_ids_in,
)
from model.masked_language_model import MaskedLanguageModel


def import_folder(source: str | Path, out: str | Path) -> MaskedLanguageModel:
    """Read a `transformers` folder, check it, and write it to `out` for a job to use.

    `out` gets config.json, model.safetensors (float32), the tokenizer files there are, and
    model.yaml, which a job names as ``model:`` beside ``init.pretrained: OUT``. Returns the
    model. Raises ModelError, one line, for a folder that is not such a model, and where `out` has
    files of a model or tokenizer already.
    """
    source, out = Path(source), Path(out)
    require_free(out)
    model = from_pretrained(source)
    has_tokenizer = any(os.path.lexists(source / name) for name in TOKENIZER_FILES)
    tokenizer = source if has_tokenizer else None
    save_pretrained(model, out, tokenizer, special_ids=special_ids_in(source))
    write_config(model.config, out, source.resolve().name)
    return model


def write_config(config: EncoderConfig, folder: Path, source: str) -> None:
    """Write model.yaml, which a job can name, beside the weights; `source` is for people."""
    text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
    (folder / "model.yaml").write_text(f"# The model of {source}\n{text}")
