"""Converting SentencePiece's ``.model`` files into tokenizers of the `tokenizers` library."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from data_pipeline.errors import DataError, as_data_errors

MARK = "\u2581"  # stands for a space in pieces
ALBERT = "albert"
# The families that number pieces as fairseq does: the first entries, with their scores, and how
# many of the file's pieces they replace. A mask comes last.
FAIRSEQ: dict[str, tuple[list[tuple[str, float]], int]] = {
    "xlmroberta": ([("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)], 3),
    "camembert": (
        [
            ("<s>NOTUSED", 0.0),
            ("<pad>", 0.0),
            ("</s>NOTUSED", 0.0),
            ("<unk>", 0.0),
            ("<unk>NOTUSED", -100.0),
        ],
        1,
    ),
}
SPLITTING = {ALBERT, *FAIRSEQ}  # split text at white space first


def read(
    data: bytes, name: str, settings: Mapping[str, Any] = MappingProxyType({})
) -> tokenizers.Tokenizer:
    """A tokenizer with the pieces, ids and normalization of a unigram or BPE model.

    `data` is the content of the file; `name` names it in messages. `settings` are the keys of a
    config beside it; its `family` says how `transformers` uses the file. Raises DataError for any
    other content.
    """
    proto, family = _parse(data, name), settings.get("family", "")
    with as_data_errors(f"{name}: not a usable SentencePiece model"):
        tokenizer = tokenizers.Tokenizer(_model(proto, name, family))
        prefix = settings.get("add_prefix_space", proto.normalizer_spec.add_dummy_prefix)
        scheme = "always" if prefix else "never"
        # Some pieces may span a space. They can match only in text that is not split at spaces.
        split = not any(MARK in piece.piece[1:] for piece in proto.pieces)
        metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
        tokenizer.pre_tokenizer = metaspace
        tokenizer.normalizer = _normalizer(proto.normalizer_spec, settings)
        if family in SPLITTING:
            splitters = [pre_tokenizers.WhitespaceSplit(), metaspace]
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme, split=split)
        added = [  # matched verbatim, before normalization
            AddedToken(piece.piece, normalized=False, special=piece.type == piece.CONTROL)
            for piece in proto.pieces
            if piece.type in (piece.CONTROL, piece.USER_DEFINED)
        ]
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


def _model(proto: Any, name: str, family: str) -> models.Model:
    spec = proto.trainer_spec
    if spec.model_type == spec.UNIGRAM:
        scores = [(piece.piece, piece.score) for piece in proto.pieces]
        if family not in FAIRSEQ:
            return models.Unigram(scores, spec.unk_id, byte_fallback=spec.byte_fallback)
        first, dropped = FAIRSEQ[family]
        unknown = [piece for piece, _ in first].index("<unk>")
        return models.Unigram([*first, *scores[dropped:], ("<mask>", 0.0)], unknown)
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
    for piece in sorted(normal, key=lambda piece: -piece.score):
        text = piece.piece
        cuts = [(text[:at], text[at:]) for at in range(1, len(text))]
        pairs = [pair for pair in cuts if numbers.keys() >= {*pair}]
        merges += sorted(pairs, key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
    return merges


def _normalizer(spec: Any, settings: Mapping[str, Any]) -> normalizers.Normalizer:
    """The normalization of the file, after what the config asks for.

    ALBERT's tokenizer replaces quotes, and by default folds case and strips accents.
    """
    family, steps = settings.get("family", ""), list[normalizers.Normalizer]()
    if family == ALBERT:
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        if not settings.get("keep_accents"):
            steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if settings.get("do_lower_case", family == ALBERT) and family not in FAIRSEQ:
        steps.append(normalizers.Lowercase())
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces and family not in SPLITTING:
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]
    return normalizers.Sequence(steps)
