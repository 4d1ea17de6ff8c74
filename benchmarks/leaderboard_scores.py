"""The scores of a masked model of any architecture and tokenizer, by `transformers` alone.

Nothing here comes from Tandem. The unit is a word, not a token, so that models with different
tokenizers can be compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

PASSAGES, WORDS, HIDDEN = 1000, 48, 0.15  # of a text; of a passage; of its words
LENGTH = 128  # tokens that every entry reads; later ones of a passage are cut off
ROWS = 32  # in one forward pass
UNREADABLE = math.log(256)  # nats a byte, where a word has unknown tokens


@dataclass(frozen=True)
class Passage:
    """Text in small letters, and the spans of its words that are hidden, in characters."""

    text: str
    hidden: list[tuple[int, int]]


class EntryError(ValueError):
    """A folder or file that cannot be scored; the message is for the user."""


def scores_of(folder: Path, texts: Mapping[str, Path], pairs: Path) -> tuple[int, dict[str, float]]:
    """The number of parameters of a model, and its scores on held-out texts and minimal pairs.

    Raises EntryError for a folder or file that cannot be scored.
    """
    model, tokenizer = load(folder)
    scores: dict[str, float] = {}
    for name, file in texts.items():
        loss, accuracy = hidden_words(model, tokenizer, passages(file.read_text(encoding="utf-8")))
        scores |= {f"{name}_loss": loss, f"{name}_accuracy": accuracy}
    scores["pairs"] = minimal_pairs(model, tokenizer, read_pairs(pairs))
    return model.num_parameters(), scores


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, ready to score, and its tokenizer; raises EntryError where it cannot enter."""
    if not folder.is_dir():
        raise EntryError(f"{folder}: is no folder")
    try:
        model, loading = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, SafetensorError) as error:
        told = str(error).strip().partition("\n")[0]
        raise EntryError(f"{folder}: transformers cannot read it: {told}") from error
    if loading["missing_keys"]:
        raise EntryError(f"{folder}: its weights lack a masked-LM head, or other parts")
    if not tokenizer.is_fast or tokenizer.mask_token is None:
        raise EntryError(f"{folder}: needs a tokenizer.json with a mask token")
    if getattr(model.config, "max_position_embeddings", LENGTH) < LENGTH:
        raise EntryError(f"{folder}: must read {LENGTH} tokens")
    return model.eval(), tokenizer


def read_pairs(file: Path) -> list[tuple[str, str]]:
    """The good and the bad sentence of each line of a file in BLiMP's format."""
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [(row["sentence_good"], row["sentence_bad"]) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise EntryError(f"{file}: is no file of minimal pairs") from error


def passages(text: str) -> list[Passage]:
    """The first words of the chosen lines of a text, with the words to hide.

    Lines are in the order of their digests, words are chosen by theirs: both depend on the text
    only.
    """
    lines = [words for line in text.splitlines() if len(words := line.lower().split()) >= WORDS]
    texts = sorted((" ".join(words[:WORDS]) for words in lines), key=_draw)[:PASSAGES]
    return [Passage(text, _hidden(text)) for text in texts]


def _hidden(text: str) -> list[tuple[int, int]]:
    spans = [match.span() for match in re.finditer(r"\w+", text)]
    return [span for span in spans if _draw(f"{span[0]} {text}") < HIDDEN]


def _draw(text: str) -> float:
    """A number in [0, 1) that depends on the text only."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def hidden_words(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Passage]
) -> tuple[float, float]:
    """The mean loss of hidden words in nats, and the fraction of them that are predicted.

    All tokens of all hidden words of a passage are masked at once. A word's loss is the sum of
    those of its tokens, and a word is predicted if each of its tokens is the first choice. A word
    with an unknown token, or that is cut off, costs as much as guessing its bytes.
    """
    losses, hits = [], []
    for start in range(0, len(texts), ROWS):
        chosen = texts[start : start + ROWS]
        batch = tokenizer(
            [passage.text for passage in chosen], padding=True, truncation=True,
            max_length=LENGTH, return_offsets_mapping=True, return_tensors="pt",
        )  # fmt: skip
        begins, ends = batch["offset_mapping"].unbind(-1)  # [rows, L], 0 for special tokens
        words = [
            (row, begin, end, (begins[row] < end) & (ends[row] > begin))
            for row, passage in enumerate(chosen)
            for begin, end in passage.hidden
        ]
        hidden = torch.zeros_like(begins, dtype=torch.bool)
        for row, _, _, tokens in words:
            hidden[row] |= tokens
        loss, right = predict(model, tokenizer, batch, hidden)
        unknown = batch["input_ids"] == tokenizer.unk_token_id
        for row, begin, end, tokens in words:
            is_read = ends[row].max() >= end and not unknown[row, tokens].any()
            size = len(chosen[row].text[begin:end].encode())
            losses.append(loss[row, tokens].sum().item() if is_read else size * UNREADABLE)
            hits.append(bool(is_read and right[row, tokens].all()))
    return sum(losses) / len(losses), sum(hits) / len(hits)


def minimal_pairs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[str, str]],
) -> float:
    """The fraction of pairs whose first sentence is the more probable one."""
    likelihoods = [
        [pseudo_log_likelihood(model, tokenizer, sentence) for sentence in pair] for pair in pairs
    ]
    return sum(good > bad for good, bad in likelihoods) / len(pairs)


def pseudo_log_likelihood(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentence: str
) -> float:
    """The sum over a sentence's tokens of the log-probability of each where it alone is masked.

    Salazar et al., 2020 (arXiv 1910.14659); nats.
    """
    encoded = tokenizer(
        sentence, truncation=True, max_length=LENGTH,
        return_special_tokens_mask=True, return_tensors="pt",
    )  # fmt: skip
    places = (encoded["special_tokens_mask"][0] == 0).nonzero()[:, 0]
    batch = {name: values.expand(len(places), -1) for name, values in encoded.items()}
    hidden = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    hidden[torch.arange(len(places)), places] = True
    return -predict(model, tokenizer, batch, hidden)[0].sum().item()


@torch.inference_mode()
def predict(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Mapping[str, Tensor],
    hidden: Tensor,
) -> tuple[Tensor, Tensor]:
    """The loss of each hidden token (nats), and whether it is the first choice; 0 elsewhere.

    Both are [rows, L], as `hidden` is. Only hidden positions reach the output layer, which takes
    most of the time of a small model.
    """
    labels = batch["input_ids"][hidden]
    ids = batch["input_ids"].masked_fill(hidden, tokenizer.mask_token_id)
    output_layer = model.get_output_embeddings()
    with output_layer.register_forward_pre_hook(lambda _, states: (states[0][hidden],)):
        logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits.float()
    loss, right = torch.zeros(hidden.shape), torch.zeros_like(hidden)
    loss[hidden] = cross_entropy(logits, labels, reduction="none")
    right[hidden] = logits.argmax(-1) == labels
    return loss, right
