"""The progress bar and the summary of a build."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from configs.progress import Work, counted
from data_pipeline.building.build import HISTOGRAM_LIMITS, Progress, Tally
from data_pipeline.building.near_duplicates import LIST
from data_pipeline.reading.corpus import remedy
from data_pipeline.text.sentences import MAX_CHARACTERS, MOST_SPACELESS, shares_of
from data_pipeline.tokenization.comparison import WARN_ABOVE

BAR_WIDTH = 40
UNSTOPPED = ("Thai", "Lao")  # scripts that separate sentences by a space at most


def show_on(told: Work) -> Callable[[Progress], None]:
    """The `on_progress` of a build that tells how many MB are read, and how fast."""
    first: list[tuple[float, int]] = []  # when it started, and with how many tokens if resumed

    def show(progress: Progress) -> None:
        first[:] = first or [(time.monotonic(), progress.tokens)]
        seconds = time.monotonic() - first[0][0]
        rate = (progress.tokens - first[0][1]) / max(seconds, 1e-9)
        note = f"{counted(progress.documents, 'document')}, {rate:,.0f} tokens/s"
        told.reach(progress.bytes_done / 1e6, progress.bytes_total / 1e6, note)

    return show


def summary(tree: dict[str, Any]) -> str:
    """A `corpus.json` as text: counts, dropped documents and a histogram of lengths."""
    lines = []
    for name, split in tree["splits"].items():
        nouns = ("document", "sentence", "token", "byte")
        counts = (counted(split[f"{noun}s"], noun) for noun in nouns)
        lines.append(f"{name:>5}: {', '.join(counts)} in {counted(split['shards'], 'shard')}")
    tally = Tally(**tree["tally"])
    near = f"{counted(tally.near_duplicates, 'near-duplicate')} dropped ({LIST} lists them), "
    lines.append(
        f"{counted(tally.duplicates, 'duplicate')} dropped, "
        f"{near if tree['identity'].get('near_duplicates') else ''}"
        f"{counted(tally.problems, 'unusable document')}"
    )
    lines += problem_lines(tally.problems, tally.first_problems)
    lines += skipped_lines(tally.skipped_files, tally.first_skipped)
    lines += tally.loss.lines()
    lines += _unknown_lines(tree["splits"].values())
    lines += _sentence_lines(tally)
    lines += _warnings(tree)
    return "\n".join([*lines, "tokens per document:", *_histogram(tally.tokens_per_document)])


def skipped_lines(count: int, first: Sequence[str]) -> list[str]:
    """The files of folders that are not read, with the reason for the `first` of them."""
    return [f"{counted(count, 'file')} skipped", *problem_lines(count, first)] if count else []


def _unknown_lines(splits: Collection[dict[str, Any]]) -> list[str]:
    """How much of the text has no entry in the vocabulary; corpora of old tell nothing."""
    unknown = sum(split.get("unknown_tokens", 0) for split in splits)
    share = unknown / max(1, sum(split["tokens"] for split in splits))
    if not unknown:
        return []
    line = f"{share:.3%} of the tokens are unknown to the tokenizer"
    if share <= WARN_ABOVE:
        return [line]
    advice = "train a tokenizer on this text, or find one with `tandem tokenizer compare`"
    return [f"warning: {line}, so a model cannot distinguish them; {advice}"]


def _sentence_lines(tally: Tally) -> list[str]:
    """Where sentences end in scripts without full stops."""
    shares = shares_of(tally.characters_by_script)
    scripts = [script for script in UNSTOPPED if shares.get(script, 0) > MOST_SPACELESS]
    rule = f"a sentence ends with its line, or after {MAX_CHARACTERS:,} characters at a space"
    return [f"{script} has no full stops: {rule}" for script in scripts]


def _warnings(tree: dict[str, Any]) -> list[str]:
    """The needs of a job that a corpus does not meet, and what to do."""
    splits, identity = tree["splits"], tree["identity"]
    documents = sum(split["documents"] for split in splits.values())
    tokens = sum(split["tokens"] for split in splits.values())
    empty = [name for name, split in splits.items() if not split["documents"]]
    is_asked = empty == ["val"] and not identity["val_fraction"] and documents > 1
    if not empty or is_asked:
        return []
    if documents == 1 and identity["reading"]["separator"] is not None:
        return ["warning: all text is 1 document; check --separator"]
    what = "no document is held out" if "val" in empty else "every document is held out"
    return [f"warning: {what}; {remedy(empty[0], documents, tokens)}"]


def problem_lines(count: int, first: Sequence[str]) -> list[str]:
    """The `first` of `count` problems, a line each, and how many more there are."""
    lines = [f"  {problem}" for problem in first]
    return [*lines, f"  ... and {count - len(first):,} more"] if count > len(first) else lines


def _histogram(counts: list[int]) -> Iterator[str]:
    names = [f"< {limit:,}" for limit in HISTOGRAM_LIMITS] + ["more"]
    filled = [number for number, count in enumerate(counts) if count]
    if not filled:
        return
    for number in range(filled[0], filled[-1] + 1):
        bar = "#" * round(BAR_WIDTH * counts[number] / max(counts))
        yield f"  {names[number]:>11} {counts[number]:>10,} {bar}"
