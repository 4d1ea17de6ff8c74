"""Importing a `transformers` checkpoint as a teacher or a student."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import yaml

from model.hugging_face.folder import (
    TOKENIZER_FILES,
    from_pretrained,
    require_free,
    save_pretrained,
    special_ids_in,
    written_whole,
)
from model.model_config import ModelConfig
from model.protocol import Model


def import_folder(source: str | Path, out: str | Path) -> Model:
    """Read a `transformers` folder, check it, and write it to `out` for a job to use.

    `out` gets config.json, model.safetensors (float32), the tokenizer files if there are any, and
    model.yaml. A job names model.yaml as ``model:`` and the folder as ``init.pretrained:``. Returns
    the model. Raises ModelError, one line, if the folder holds no such model, or if `out` already
    has files of a model or tokenizer.
    """
    source, out = Path(source), Path(out)
    require_free(out)
    model = from_pretrained(source)
    has_tokenizer = any(os.path.lexists(source / name) for name in TOKENIZER_FILES)
    tokenizer = source if has_tokenizer else None
    with written_whole(out):
        save_pretrained(model, out, tokenizer, special_ids=special_ids_in(source))
        write_config(model.config, out, source.resolve().name)
    return model


def write_config(config: ModelConfig, folder: Path, source: str) -> None:
    """Write model.yaml, which a job can name, beside the weights; `source` goes into a comment."""
    text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
    (folder / "model.yaml").write_text(f"# The model of {source}\n{text}")
