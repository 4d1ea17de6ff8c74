"""Training a tokenizer: ``tandem tokenizer train``."""

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, models, pre_tokenizers, trainers

from configs.errors import OptionError
from configs.progress import Work, work
from data_pipeline.errors import DataError, as_data_errors
from data_pipeline.hashing import LineDraw, array_keys, scalar_key
from data_pipeline.shards.writing import disk_errors, refuse_existing
from data_pipeline.text.documents import (
    PROBLEMS_SHOWN,
    Problem,
    location_of,
    read_documents,
    require_usable,
)
from data_pipeline.text.formats import ReadOptions, find_inputs
from data_pipeline.text.sentences import MOST_SPACELESS, SPACELESS, script_of, shares_of
from data_pipeline.text.text_files import STDIN
from data_pipeline.tokenization import sentencepiece_models, vocabularies
from data_pipeline.tokenization.comparison import WARN_ABOVE, LossCounter, NormalizationLoss
from data_pipeline.tokenization.tokenizer import TOKENIZER_FILES, save
from data_pipeline.tokenization.vocabularies import Roles

SPECIAL_TOKENS = [names[0] for names in vocabularies.ROLES.values()]  # ids 0 to 4
LINE_CHARACTERS = 4000  # longer lines are cut, as SentencePiece skips lines beyond a limit
UTF_8_BYTES = 4  # of a character, at most
MAX_VOCAB_SIZE = 1 << 20  # the libraries allocate memory for this many
UNIGRAM_LINES = 2_000_000  # SentencePiece holds all that it is given in memory
# A WordPiece vocabulary has this many characters, the most frequent ones; more where these are less
# than `COVERAGE` of the text, as of Chinese or Korean, up to a third of its entries.
ALPHABET = 1000
COVERAGE = 0.9999
# SentencePiece's own. Alone it makes rare letters and marks unknown (of German "?" and "Ö"), so a
# unigram vocabulary too has the `ALPHABET` most frequent characters.
UNIGRAM_COVERAGE = 0.9995
TURKISH = "\u0130\u0131"  # dotted capital and dotless small i

Read = Callable[[], Iterable[str]]  # all documents, from the first


class Sample(NamedTuple):
    """How many lines of a text are used, drawn evenly from all of it, and how many it has."""

    used: int
    lines: int


class Rule(NamedTuple):
    """The differences in a text that a tokenizer ignores."""

    lowercase: bool = False
    strip_accents: bool = False


class Trained(NamedTuple):
    """A tokenizer; `sample` is None where the whole text was used."""

    tokenizer: tokenizers.Tokenizer
    roles: Roles
    sample: Sample | None = None


Trainer = Callable[[Read, int, Rule], Trained]
_Function = TypeVar("_Function", bound=Trainer)
TRAINERS: dict[str, Trainer] = {}  # by the words of `--kind`


def register_tokenizer(kind: str) -> Callable[[_Function], _Function]:
    """A decorator: ``--kind KIND`` trains a tokenizer by this function.

    It reads the text, and makes a tokenizer of at most so many entries, with `SPECIAL_TOKENS` as
    its first; `complete` finds their roles. All that the tokenizer does is in its own file.
    """

    def register(function: _Function) -> _Function:
        if kind in TRAINERS:
            raise TypeError(f"another kind of tokenizer is called {kind}; give it another name")
        TRAINERS[kind] = function
        return function

    return register


@dataclass
class Unusable:
    """How many documents cannot be used, and where the first ones are and why."""

    count: int = 0
    first: list[str] = field(default_factory=list)  # at most PROBLEMS_SHOWN

    def __call__(self, problem: Problem) -> None:
        self.count += 1
        if len(self.first) < PROBLEMS_SHOWN:
            self.first.append(f"{location_of(problem)}: {problem.reason}")


@dataclass(frozen=True)
class LeftOut:
    """The parts of its text that a tokenizer is not trained on."""

    unusable: Unusable
    sample: Sample | None  # None: all lines are used
    skipped: list[str]  # files of folders, with the reasons
    loss: NormalizationLoss  # what the normalizer removes from the text
    folds_case: bool
    is_turkish: bool  # or a relative: folding takes some of its letters for others


def train(
    inputs: Sequence[str],
    kind: str,
    vocab_size: int,
    out: str,
    *,
    cased: bool | None = None,
    strip_accents: bool = False,
    reading: ReadOptions | None = None,
) -> LeftOut:
    """Train a tokenizer on text and write it to the folder `out`, in Hugging Face format.

    The text is read several times. The same text gives the same files. [PAD] [UNK] [CLS] [SEP]
    [MASK] get the ids 0 to 4. By default WordPiece is uncased, and the other kinds are cased.
    Accents are kept; `strip_accents` is BERT's uncased rule, for WordPiece. Of a text with more
    than `UNIGRAM_LINES` lines, a unigram vocabulary is trained on that many. Raises DataError for
    missing or empty inputs and for standard input, an unknown kind, or a folder that holds a
    tokenizer. Also if the vocabulary size does not fit the text or the kind, and for WordPiece
    where the text has no spaces between words.
    """
    _require_usable_options(kind, vocab_size, strip_accents)
    refuse_existing(Path(out) / name for name in TOKENIZER_FILES)
    if STDIN in inputs:
        raise DataError(f"{STDIN}: a tokenizer reads its text several times; save it in a file")
    skipped = find_inputs(inputs, reading or ReadOptions()).skipped
    if next(read_documents(inputs, reading, on_problem=(problems := Unusable())), None) is None:
        require_usable(inputs, 0, problems.count, next(iter(problems.first), None))
    read = _reader(inputs, reading, unusable := Unusable())
    lowercase = kind == "wordpiece" if cased is None else not cased
    rule = Rule(lowercase, strip_accents)
    with (
        as_data_errors(f"tokenizer: cannot be trained with --vocab-size {vocab_size}"),
        work("tokenizer", "characters", ticks=True) as told,
    ):
        tokenizer, roles, sample = TRAINERS[kind](_told(read, told), vocab_size, rule)
    _require_size(tokenizer, vocab_size)
    _save(tokenizer, roles, Path(out))
    with work("tokenizer", "characters") as told:
        loss, turkish = _loss(tokenizer, _told(read, told)())
    is_turkish = turkish > WARN_ABOVE * sum(loss.characters.values())
    return LeftOut(unusable, sample, skipped, loss, lowercase, is_turkish)


def _require_usable_options(kind: str, vocab_size: int, strip_accents: bool) -> None:
    if kind not in TRAINERS:
        raise OptionError(
            f"--kind {kind}: must be one of {', '.join(TRAINERS)}, or one of a --plugin"
        )
    if strip_accents and kind != "wordpiece":
        raise OptionError(f"--strip-accents: is for --kind wordpiece; --kind {kind} keeps accents")
    if not len(SPECIAL_TOKENS) < vocab_size <= MAX_VOCAB_SIZE:
        least = len(SPECIAL_TOKENS) + 1
        raise OptionError(f"--vocab-size {vocab_size}: must be from {least} to {MAX_VOCAB_SIZE:,}")


def _require_size(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> None:
    size = tokenizer.get_vocab_size()
    if size > vocab_size:
        raise OptionError(
            f"--vocab-size {vocab_size}: must be at least {size} for the characters of this text"
        )


def _told(read: Read, told: Work) -> Read:
    """Reads as `read` does, and tells how much it has read; then a library is at work."""

    def documents() -> Iterator[str]:
        told.begin("tokenizer: reading the text")
        characters = 0
        for document in read():
            yield document
            characters += len(document)
            told.advance(len(document))
        told.begin(f"tokenizer: learning the vocabulary of {characters:,} characters")

    return documents


def _loss(
    tokenizer: tokenizers.Tokenizer, documents: Iterable[str]
) -> tuple[NormalizationLoss, int]:
    """The normalizer's loss, and the number of `TURKISH` letters."""
    counter, loss, turkish = LossCounter(tokenizer), NormalizationLoss(), 0
    for document in documents:
        loss.add(counter([document]))
        turkish += sum(map(document.count, TURKISH))
    return loss, turkish


def _save(tokenizer: tokenizers.Tokenizer, roles: Roles, out: Path) -> None:
    """Write a tokenizer where none was; leaves no part of one, so that the command can be repeated.

    Raises DataError, and OSError where there can be no such folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    try:
        with disk_errors(out / "tokenizer.json"):
            save(tokenizer, roles, out)
    except BaseException:
        for name in TOKENIZER_FILES:
            with suppress(OSError):
                (out / name).unlink()
        raise


def _reader(inputs: Sequence[str], reading: ReadOptions | None, unusable: Unusable) -> Read:
    """Reads all documents at each call; the first counts unusable ones, and refuses too many."""

    def counted() -> Iterator[str]:
        usable = 0
        for document in read_documents(inputs, reading, unusable):
            usable += 1
            yield document
        require_usable(inputs, usable, unusable.count, next(iter(unusable.first), None))

    reads = chain([counted], repeat(lambda: read_documents(inputs, reading)))
    return lambda: next(reads)()


@register_tokenizer("wordpiece")
def _wordpiece(read: Read, vocab_size: int, rule: Rule) -> Trained:
    """Train WordPiece so that the same text gives the same vocabulary.

    The library numbers the continuations (##a) of single characters in the order of a hash table,
    which differs from run to run, and breaks ties between merges by these numbers. So they are
    listed beforehand, among the special tokens, which it numbers in the order given.
    """
    alphabet, continuations = _characters(read, vocab_size, rule)
    tokenizer = _untrained_wordpiece(rule)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *continuations],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read(), trainer)
    trained = tokenizer.get_vocab()
    first = [*SPECIAL_TOKENS, *alphabet, *continuations]
    merged = sorted(trained.keys() - set(first), key=trained.__getitem__)
    ids = {token: number for number, token in enumerate([*first, *merged])}
    return Trained(*vocabularies.complete(_untrained_wordpiece(rule, ids), {}))


def _characters(read: Read, vocab_size: int, rule: Rule) -> tuple[list[str], list[str]]:
    """The alphabet of a text after normalization, and those of its continuations that occur."""
    counts: Counter[str] = Counter()

    def counted() -> Iterator[str]:
        for document in read():
            counts.update(document)
            yield document

    tokenizer = _untrained_wordpiece(rule)
    no_merges = trainers.WordPieceTrainer(vocab_size=0, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator(counted(), no_merges)
    _require_spaces(counts)
    vocabulary = tokenizer.get_vocab()
    normalized: Counter[str] = Counter()
    for character, count in counts.items():
        for symbol in tokenizer.normalizer.normalize_str(character):
            normalized[symbol] += count
    characters = [token for token in vocabulary if len(token) == 1]
    frequent = sorted(characters, key=lambda symbol: (-normalized[symbol], symbol))
    covered = np.cumsum([normalized[symbol] for symbol in frequent])
    enough = 1 + int(np.searchsorted(covered, COVERAGE * covered[-1]))
    alphabet = sorted(frequent[: max(ALPHABET, min(enough, vocab_size // 3))])
    return alphabet, [f"##{symbol}" for symbol in alphabet if f"##{symbol}" in vocabulary]


def _require_spaces(counts: Mapping[str, int]) -> None:
    """Raise DataError for a text whose words have no spaces between them.

    Whole phrases would be taken for words. Chinese is cut into its characters, as in BERT.
    """
    by_script: Counter[str] = Counter()
    for character, count in counts.items():
        by_script[script_of(character)] += count
    shares = shares_of(by_script)
    if sum(shares.get(script, 0) for script in SPACELESS) > MOST_SPACELESS:
        script = next(script for script in shares if script in SPACELESS)
        raise OptionError(
            f"--kind wordpiece: {shares[script]:.0%} of the letters are {script}, which has no "
            "spaces between words; use --kind unigram"
        )


def _untrained_wordpiece(rule: Rule, ids: dict[str, int] | None = None) -> tokenizers.Tokenizer:
    return vocabularies.bert_tokenizer(models.WordPiece(ids or {}, unk_token="[UNK]"), *rule)


@register_tokenizer("bpe")
def _byte_level(read: Read, vocab_size: int, rule: Rule) -> Trained:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + len(SPECIAL_TOKENS):
        raise OptionError(f"--vocab-size {vocab_size}: byte-level BPE needs at least 261")
    tokenizer = vocabularies.byte_level_tokenizer(models.BPE())
    tokenizer.pre_tokenizer = vocabularies.byte_level_words()
    if rule.lowercase:
        tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(read(), trainer)
    tokenizer, roles = vocabularies.complete(tokenizer, {})
    # A mask in a text stands for a word with the space before it, as RoBERTa's does.
    tokenizer.add_special_tokens([AddedToken(roles["mask"], lstrip=True, normalized=False)])
    return Trained(tokenizer, roles)


@register_tokenizer("unigram")
def _unigram(read: Read, vocab_size: int, rule: Rule) -> Trained:
    import sentencepiece

    counts: Counter[str] = Counter()
    lines = 0
    for line in _lines(read()):
        counts.update(line)
        lines += 1
    frequent = counts.most_common(min(ALPHABET, vocab_size // 3))
    share = sum(count for _, count in frequent) / max(1, counts.total())
    sample = Sample(UNIGRAM_LINES, lines) if lines > UNIGRAM_LINES else None
    used = _lines(read()) if sample is None else _drawn(_lines(read()), sample)
    model = io.BytesIO()
    pad, unk, cls, sep, mask = SPECIAL_TOKENS
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=used,
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            character_coverage=max(UNIGRAM_COVERAGE, share),
            normalization_rule_name="nmt_nfkc_cf" if rule.lowercase else "nmt_nfkc",
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            pad_piece=pad,
            unk_piece=unk,
            bos_piece=cls,
            eos_piece=sep,
            control_symbols=[mask],
            max_sentence_length=LINE_CHARACTERS * UTF_8_BYTES,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise OptionError(f"--vocab-size {vocab_size}: {_reason(str(error))}") from None
    read_back = sentencepiece_models.read(model.getvalue(), "the trained model")
    return Trained(*vocabularies.complete(read_back, {}), sample)


def _reason(words: str) -> str:
    """A message to the user for an error of SentencePiece, which quotes its source code."""
    for pattern, meaning in (
        (r"required_chars\. \d+ vs (\d+)", "must be at least {} for the characters of this text"),
        (r"a value <= (\d+)", "must be at most {} for this little text"),
    ):
        if match := re.search(pattern, words):
            return meaning.format(match[1])
    return "this text has no unigram vocabulary of this size; choose another size"


def _lines(documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        for line in document.splitlines():
            for start in range(0, len(line), LINE_CHARACTERS):
                yield line[start : start + LINE_CHARACTERS]


def _drawn(lines: Iterable[str], sample: Sample) -> Iterator[str]:
    """The lines of a sample: one from each of `sample.used` equal stretches of the text."""
    numbers = iter(_line_numbers(sample).tolist())
    wanted = next(numbers)
    for number, line in enumerate(lines):
        if number == wanted:
            yield line
            wanted = next(numbers, None)


def _line_numbers(sample: Sample) -> NDArray[np.int64]:
    """Which lines are used, from 0, ascending: [sample.used].

    A hash says which one of its stretch: every second line of a text could be of one language.
    """
    starts = np.arange(sample.used + 1, dtype=np.int64) * sample.lines // sample.used
    keys = array_keys(scalar_key(LineDraw.SAMPLE), np.arange(sample.used))
    return starts[:-1] + (keys % np.diff(starts).astype(np.uint64)).astype(np.int64)
