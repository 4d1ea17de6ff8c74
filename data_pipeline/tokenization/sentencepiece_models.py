"""Converting SentencePiece's ``.model`` files into tokenizers of the `tokenizers` library."""

from __future__ import annotations

import importlib
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from data_pipeline.errors import DataError
from data_pipeline.tokenization.library_errors import as_data_errors

MARK = "\u2581"  # stands for a space in pieces


def read(data: bytes, name: str) -> tokenizers.Tokenizer:
    """A tokenizer with the pieces, ids and normalization of a unigram or BPE model.

    `data` is the content of the file; `name` names it in messages. Raises DataError for any other
    content.
    """
    proto = _parse(data, name)
    with as_data_errors(f"{name}: not a usable SentencePiece model"):
        tokenizer = tokenizers.Tokenizer(_model(proto, name))
        tokenizer.normalizer = _normalizer(proto.normalizer_spec)
        scheme = "always" if proto.normalizer_spec.add_dummy_prefix else "never"
        # Some pieces may span a space. They can match only in text that is not split at spaces.
        split = not any(MARK in piece.piece[1:] for piece in proto.pieces)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme, split=split)
        added = [_added(piece) for piece in proto.pieces if _is_added(piece)]
        tokenizer.add_tokens(added)
    return tokenizer


def _parse(data: bytes, name: str) -> Any:
    schema: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    proto = schema.ModelProto()
    with as_data_errors(f"{name}: not a SentencePiece model"):
        proto.ParseFromString(data)
    if not proto.pieces:
        raise DataError(f"{name}: not a SentencePiece model: it has no pieces")
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise DataError(
            f"{name}: marks spaces after words; retrain it without treat_whitespace_as_suffix"
        )
    return proto


def _model(proto: Any, name: str) -> models.Model:
    spec = proto.trainer_spec
    if spec.model_type == spec.UNIGRAM:
        scores = [(piece.piece, piece.score) for piece in proto.pieces]
        return models.Unigram(scores, spec.unk_id, byte_fallback=spec.byte_fallback)
    if spec.model_type == spec.BPE:
        return models.BPE(
            {piece.piece: number for number, piece in enumerate(proto.pieces)},
            _merges(proto),
            unk_token=proto.pieces[spec.unk_id].piece,
            fuse_unk=True,
            byte_fallback=spec.byte_fallback,
        )
    raise DataError(f"{name}: only unigram and BPE models of SentencePiece can be read")


def _merges(proto: Any) -> list[tuple[str, str]]:
    """All merges, ordered by the score of the piece that they make, best first.

    A SentencePiece model stores only pieces and scores. Any two pieces that join into a third are
    a merge.
    """
    normal = [piece for piece in proto.pieces if piece.type in (piece.NORMAL, piece.UNUSED)]
    numbers = {piece.piece: number for number, piece in enumerate(normal)}
    merges = []
    for piece in sorted(normal, key=lambda one: -one.score):
        text = piece.piece
        cuts = [(text[:at], text[at:]) for at in range(1, len(text))]
        pairs = [pair for pair in cuts if numbers.keys() >= {*pair}]
        merges += sorted(pairs, key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
    return merges


def _normalizer(spec: Any) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    return normalizers.Sequence(steps)


def _is_added(piece: Any) -> bool:
    """Whether a piece is matched verbatim, before normalization."""
    return bool(piece.type in (piece.CONTROL, piece.USER_DEFINED))


def _added(piece: Any) -> AddedToken:
    return AddedToken(piece.piece, normalized=False, special=piece.type == piece.CONTROL)
