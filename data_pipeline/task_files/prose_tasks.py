"""Small labelled tasks, made from any prose with spaces between words, and English above all.

    python -m data_pipeline.task_files.prose_tasks TEXT --out DIR

The labels come for nothing: from the order of the words, of the sentences, and from the capital
letters that the author wrote. Each task has a file to train on and one to score on, of different
documents. The same text always gives the same files.

- ``order_*.tsv``: is a sentence as it was written, or are its words shuffled?
- ``neighbours_*.tsv``: does a sentence follow another, or is it from another document?
- ``capitals_*.txt``: which words, here in small letters, begin with a capital (CoNLL, IOB2)?
- ``pairs.jsonl``: minimal pairs, with words swapped or an English verb in the wrong number.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.text.documents import read_documents
from data_pipeline.text.sentences import OTHER_STOPS, sentence_ends, word_pattern

TRAIN, VALIDATION = "train", "validation"
EXAMPLES = {TRAIN: 2000, VALIDATION: 500}  # of each task, at most
PAIRS = 150  # of each phenomenon, at most
HELD_OUT = 8  # every 8th document is for validation
WORDS = range(6, 31)  # of a sentence
OTHER_NUMBER = {
    **{"is": "are", "was": "were", "has": "have", "does": "do", "this": "these"},
    **{"are": "is", "were": "was", "have": "has", "do": "does", "these": "this"},
}

Document = list[str]  # its sentences, in order


def documents(path: str) -> Iterator[Document]:
    """The documents of a text file, each as its sentences of ordinary length; none comes twice."""
    seen: set[str] = set()
    for text in read_documents([path]):
        ends = sentence_ends(text)
        cut = (text[start:end] for start, end in zip([0, *ends], ends, strict=False))
        sentences = [" ".join(part.split()) for part in cut]
        kept = [
            sentence
            for sentence in dict.fromkeys(sentences)
            if _is_ordinary(sentence) and sentence not in seen
        ]
        seen.update(kept)
        if kept:
            yield kept


def order_examples(texts: Sequence[Document], draw: random.Random) -> Iterator[str]:
    """Lines of a text and its label: written or shuffled."""
    yield "text\tlabel"
    for sentence in _shuffled(texts, draw):
        if draw.random() < 0.5:
            yield f"{sentence}\twritten"
        elif (other := shuffled(sentence, draw)) != sentence:
            yield f"{other}\tshuffled"


def neighbour_examples(texts: Sequence[Document], draw: random.Random) -> Iterator[str]:
    """Lines of two texts and the label: yes or no."""
    yield "text_a\ttext_b\tlabel"
    places = [
        (document, at) for document in range(len(texts)) for at in range(len(texts[document]) - 1)
    ]
    draw.shuffle(places)
    for document, at in places:
        follows = draw.random() < 0.5
        other = (document + draw.randrange(1, len(texts))) % len(texts) if len(texts) > 1 else 0
        second = texts[document][at + 1] if follows else draw.choice(texts[other])
        yield f"{texts[document][at]}\t{second}\t{'yes' if follows else 'no'}"


def capital_examples(texts: Sequence[Document], draw: random.Random) -> Iterator[str]:
    """Sentences in CoNLL's columns, a string each: words in small letters, and their tags."""
    for sentence in _shuffled(texts, draw):
        words = word_pattern("'\u2019", signs=True).findall(sentence)
        lines, before = [], "O"
        for number, word in enumerate(words):
            is_capital = number > 0 and word[0].isupper()
            tag = ("B-CAP" if before == "O" else "I-CAP") if is_capital else "O"
            lines.append(f"{word.lower()} {tag}")
            before = tag
        yield "\n".join(lines) + "\n"


def minimal_pairs(
    texts: Sequence[Document], draw: random.Random, most: int = PAIRS
) -> Iterator[str]:
    """Minimal pairs as BLiMP's JSON lines: at most `most` of each phenomenon."""
    makers = {"word order": swapped, "agreement": disagreeing}
    for phenomenon, make in makers.items():
        made = ((sentence, make(sentence, draw)) for sentence in _shuffled(texts, draw))
        for good, bad in islice(((good, bad) for good, bad in made if bad), most):
            names = {"UID": phenomenon.replace(" ", "_"), "linguistics_term": phenomenon}
            yield json.dumps({"sentence_good": good, "sentence_bad": bad, **names})


def shuffled(sentence: str, draw: random.Random) -> str:
    """The sentence with all words but the first and the last in a random order."""
    first, *middle, last = sentence.split()
    draw.shuffle(middle)
    return " ".join([first, *middle, last])


def swapped(sentence: str, draw: random.Random) -> str:
    """The sentence with two neighbouring words swapped, neither the first nor the last."""
    words = sentence.split()
    places = [n for n in range(1, len(words) - 2) if words[n].lower() != words[n + 1].lower()]
    if not places:
        return ""
    at = draw.choice(places)
    return " ".join([*words[:at], words[at + 1], words[at], *words[at + 2 :]])


def disagreeing(sentence: str, draw: random.Random) -> str:
    """The sentence with a verb or determiner in the other number; empty where there is none."""
    words = sentence.split()
    places = [number for number, word in enumerate(words) if word in OTHER_NUMBER]
    if not places:
        return ""
    at = draw.choice(places)
    return " ".join([*words[:at], OTHER_NUMBER[words[at]], *words[at + 1 :]])


def write_tasks(text: str, out: Path, pairs: int = PAIRS) -> dict[str, int]:
    """Write the files of all tasks; returns how many examples each file has.

    There are at most `pairs` minimal pairs of each phenomenon. Raises DataError for a text of which
    no tasks can be made.
    """
    texts_in_order = list(documents(text))
    if not texts_in_order:
        raise DataError(
            f"{text}: has no sentence of {WORDS[0]} to {WORDS[-1]} words between spaces that "
            "ends with a full stop; these tasks cannot be made of it"
        )
    out.mkdir(parents=True, exist_ok=True)
    parts = {
        TRAIN: [
            document for number, document in enumerate(texts_in_order) if (number + 1) % HELD_OUT
        ],
        VALIDATION: texts_in_order[HELD_OUT - 1 :: HELD_OUT],
    }
    written = {}
    for split, texts in parts.items():
        for name, make, header in _TASKS:
            lines = islice(make(texts, random.Random(0)), EXAMPLES[split] + header)
            written[name.format(split)] = _write(out / name.format(split), lines) - header
    held_out = minimal_pairs(parts[VALIDATION], random.Random(0), pairs)
    written["pairs.jsonl"] = _write(out / "pairs.jsonl", held_out)
    return written


_TASKS: tuple[
    tuple[str, Callable[[Sequence[Document], random.Random], Iterator[str]], int], ...
] = (
    ("order_{}.tsv", order_examples, 1),
    ("neighbours_{}.tsv", neighbour_examples, 1),
    ("capitals_{}.txt", capital_examples, 0),
)  # file, what makes its lines, and how many of them are a header


def _is_ordinary(sentence: str) -> bool:
    return len(sentence.split()) in WORDS and sentence.endswith((".", *OTHER_STOPS))


def _shuffled(texts: Iterable[Document], draw: random.Random) -> list[str]:
    sentences = [sentence for document in texts for sentence in document]
    draw.shuffle(sentences)
    return sentences


def _missing(out: Path) -> Iterator[str]:
    """Yield a line for each task that lacks its material in the text's language."""
    if "B-CAP" not in (out / f"capitals_{TRAIN}.txt").read_text(encoding="utf-8"):
        yield "capitals: no word inside a sentence has one, so nothing can be learned"
    if '"agreement"' not in (out / "pairs.jsonl").read_text(encoding="utf-8"):
        words = ", ".join(OTHER_NUMBER)
        yield f"pairs.jsonl: has no agreement, which is made of English words: {words}"


def _write(path: Path, lines: Iterable[str]) -> int:
    kept = list(lines)
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    return len(kept)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the tasks of a text and print their sizes."""
    parser = argparse.ArgumentParser(
        prog="python -m data_pipeline.task_files.prose_tasks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("text", help="the text, as `tandem data build` reads it")
    parser.add_argument("--out", required=True, type=Path, help="the folder to write")
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, help=f"of each phenomenon, at most ({PAIRS})"
    )
    given = parser.parse_args(arguments)
    if given.pairs < 0:
        parser.error(f"--pairs {given.pairs}: must be 0 or more")
    try:
        written = write_tasks(given.text, given.out, given.pairs)
    except (DataError, OSError) as error:
        parser.exit(1, f"{error}\n")
    for name, examples in written.items():
        print(f"{given.out / name}: {examples:,} examples")
    for line in _missing(given.out):
        print(line)


if __name__ == "__main__":
    main()
