"""Names that other libraries have for keys of a config, so that a message can name the key."""

from __future__ import annotations

from collections.abc import Sequence

# transformers' configs and TrainingArguments, run_mlm.py, DeepSpeed. A key may be of a section that
# stands beside: optimizer.kind.
_KEYS = {
    "attention_probs_dropout_prob": "attention_dropout",
    "bf16": "precision",
    "fp16": "precision",
    "gradient_checkpointing": "checkpoint_activations",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "intermediate_size": "ffn_size",
    "layer_norm_eps": "norm_eps",
    "lr": "learning_rate",
    "lr_scheduler_type": "schedule.kind",
    "max_grad_norm": "gradient_clipping",
    "max_position_embeddings": "max_positions",
    "max_seq_length": "sequence_length",
    "max_steps": "steps",
    "mlm_probability": "masking.rate",
    "num_attention_heads": "heads",
    "num_hidden_layers": "layers",
    "num_key_value_heads": "kv_heads",
    "num_train_epochs": "epochs",
    "num_warmup_steps": "warmup_steps",
    "optim": "optimizer.kind",
    "per_device_train_batch_size": "batch.micro_batch",
    "torch_compile": "compile",
    "type_vocab_size": "segment_types",
    "warmup_ratio": "warmup_fraction",
}


def our_key(name: str, keys: Sequence[str]) -> str | None:
    """The key that another library calls `name`, if the section with these `keys` has it."""
    key = _KEYS.get(name)
    return key if key and key.partition(".")[0] in keys else None
