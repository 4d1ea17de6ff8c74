"""Reading and writing `transformers` folders: config.json, model.safetensors, tokenizer files.

Each architecture is one `Family`, which maps its configuration and tensor names to ours. A model
that `transformers` cannot express is saved in Tandem's own format (``model_type: tandem``): the
same files, with the keys of its `ModelConfig` and our tensor names.
"""
