"""Text of other languages than English: nothing of it is dropped or taken apart in silence."""

from __future__ import annotations

import itertools
import re
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from click.testing import CliRunner
from transformers import AutoTokenizer

from data_pipeline.building.merging import merge
from data_pipeline.text.sentences import sentence_ends
from data_pipeline.tokenization.tokenizer import load
from data_pipeline.tokenization.training import train
from data_pipeline.tokenization.word_encoding import rule_of
from tandem import main

HINDI = "हिन्दी में लिखा हुआ"
VIETNAMESE = "Tiếng Việt là ngôn ngữ của người Việt"
UKRAINIAN = "Їжак \u0456 його країна"
DECOMPOSED = unicodedata.normalize("NFD", VIETNAMESE)
THAI = "ภาษาไทยเป็นภาษาที่ใช้"
JAPANESE = "子供たちは校庭でサッカーをしています"
PERSIAN = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
ENGLISH = "Plain words of a plain text are written here and there"


def run(*words: object) -> str:
    done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


def trained(folder: Path, text: str, *options: str, kind: str = "wordpiece", size=200) -> str:
    (folder / "text.txt").write_text("\n\n".join([text] * 20), encoding="utf-8")
    command = ("tokenizer", "train", folder / "text.txt", "--kind", kind, "--vocab-size", size)
    return run(*command, "--out", folder / "out", *options)


@pytest.mark.parametrize("text", [HINDI, VIETNAMESE, UKRAINIAN, DECOMPOSED])
@pytest.mark.parametrize("case", ["--cased", "--uncased"])
def test_accents_and_vowel_signs_are_kept(tmp_path, text, case) -> None:
    output = trained(tmp_path, text, case)
    assert "the tokenizer's normalizer removes no character" in output
    encoding = load(tmp_path / "out")[0].encode(text, add_special_tokens=False)
    read = "".join(token.removeprefix("##") for token in encoding.tokens)
    expected = text if case == "--cased" else text.lower()
    assert read == expected.replace(" ", "")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(text, add_special_tokens=False)["input_ids"] == encoding.ids


@pytest.mark.parametrize(
    ("text", "script"),
    [
        (HINDI, "Devanagari"),
        (VIETNAMESE, "Latin"),
        (DECOMPOSED, "combining marks"),
        (UKRAINIAN, "Cyrillic"),
    ],
)
def test_what_strip_accents_removes_is_reported_with_its_share(tmp_path, text, script) -> None:
    output = trained(tmp_path, text, "--strip-accents")
    letters = [one for one in text if not one.isspace()]
    decomposed = [unicodedata.normalize("NFD", one) for one in letters]
    lost = sum(any(unicodedata.category(x) == "Mn" for x in one) for one in decomposed)
    (line,) = (line for line in output.splitlines() if line.startswith("warning: "))
    assert f"{lost / len(letters):.3%} of the characters" in line
    assert f"of {script}" in line
    built = ("data", "build", tmp_path / "text.txt", "--tokenizer", tmp_path / "out")
    assert line in run(*built, "--out", tmp_path / "corpus", "--keep-duplicates")


def test_few_accents_in_much_english_are_reported_without_a_warning(tmp_path) -> None:
    output = trained(tmp_path, ENGLISH * 100 + " caf\u00e9", "--strip-accents")
    assert "warning" not in output
    assert "% of Latin" in output


def test_joiners_that_are_dropped_count(tmp_path) -> None:
    assert "100.00% of joiners" in trained(tmp_path, PERSIAN)
    (tmp_path / "bpe").mkdir()
    assert "removes no character" in trained(tmp_path / "bpe", PERSIAN, kind="bpe", size=300)


def test_slices_report_what_one_build_reports(tmp_path) -> None:
    trained(tmp_path, ENGLISH, "--strip-accents")
    texts = [HINDI, VIETNAMESE, UKRAINIAN, ENGLISH]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text * 50, encoding="utf-8")
    files = [tmp_path / f"{number}.txt" for number in range(len(texts))]
    build = ("data", "build", *files, "--tokenizer", tmp_path / "out", "--val-fraction", "0")
    whole = run(*build, "--out", tmp_path / "whole")
    for task in ("0/2", "1/2"):
        run(*build, "--out", tmp_path / "parts", "--task", task)
    counts = merge(str(tmp_path / "parts"))["tally"]["removed_by_script"]
    assert sorted(counts) == ["Cyrillic", "Devanagari", "Latin"]
    warnings = [line for line in whole.splitlines() if line.startswith("warning: ")]
    (line,) = (line for line in warnings if "normalizer" in line)
    assert all(f"of {script}" in line for script in counts)


def test_accents_of_other_kinds_cannot_be_stripped(tmp_path) -> None:
    (tmp_path / "text.txt").write_text(ENGLISH)
    command = ["tokenizer", "train", str(tmp_path / "text.txt"), "--kind", "bpe"]
    options = ["--vocab-size", "300", "--out", str(tmp_path / "out"), "--strip-accents"]
    done = CliRunner().invoke(main, [*command, *options])
    assert done.exit_code != 0
    assert "--strip-accents: is for --kind wordpiece" in done.output


def test_byte_level_words_are_not_cut_at_vowel_signs(tmp_path: Path) -> None:
    """GPT-2's splitting, which a token cannot span, cut both in front of each of these signs."""
    words = ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u0e1a\u0e49\u0e32\u0e19"]
    (tmp_path / "text.txt").write_text(" ".join([*words, "it's", "3,5"] * 50), encoding="utf-8")
    train([str(tmp_path / "text.txt")], "bpe", 400, str(tmp_path / "out"))
    tokenizer, _ = load(tmp_path / "out")
    assert [len(tokenizer.encode(f" {word}", add_special_tokens=False)) for word in words] == [1, 1]
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str("it's 3,5  !\n x")
    gpt2 = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert pieces == gpt2.pre_tokenize_str("it's 3,5  !\n x")
    assert rule_of(tokenizer), "encoded fast"


@pytest.mark.parametrize(
    ("text", "script", "size"), [(THAI, "Thai", 22), (JAPANESE, "Hiragana", 25)]
)
def test_wordpiece_refuses_text_without_spaces_between_words(tmp_path, text, script, size) -> None:
    (tmp_path / "text.txt").write_text(text + " " + ENGLISH, encoding="utf-8")
    command = ["tokenizer", "train", str(tmp_path / "text.txt"), "--vocab-size", "200"]
    done = CliRunner().invoke(main, [*command, "--kind", "wordpiece", "--out", str(tmp_path)])
    assert done.exit_code != 0
    reason = f"of the letters are {script}, which has no spaces between words; use --kind unigram"
    assert reason in done.output
    assert "removes no character" in trained(tmp_path, text, kind="unigram", size=size)


def test_a_rare_letter_is_known_to_unigram(tmp_path) -> None:
    """SentencePiece's default makes the rarest 0.05% of the characters unknown."""
    words = map("".join, itertools.product("bdfgklmnprst", "aeiou", "bdfgklmnprst"))
    trained(tmp_path, " ".join(words) * 4 + " Öl?", kind="unigram", size=80)
    tokenizer, _ = load(tmp_path / "out")
    ids = tokenizer.encode("Öl?", add_special_tokens=False).ids
    assert tokenizer.token_to_id("[UNK]") not in ids


def test_every_character_of_a_large_alphabet_is_known(tmp_path) -> None:
    """Of Chinese or Korean all but the first 1,000 characters were unknown."""
    text = " ".join(map(chr, range(0x4E00, 0x4E00 + 1500)))
    trained(tmp_path, text, size=6000)
    tokenizer, _ = load(tmp_path / "out")
    assert "[UNK]" not in tokenizer.encode(text, add_special_tokens=False).tokens


@pytest.mark.parametrize(
    "sentences",
    [
        ["यह पहला वाक्य है।", " क्या यह दूसरा है?", " हाँ॥", "और"],
        ["هذه جملة.", " هل هذه جملة؟", " نعم."],
        ["یہ جملہ ہے\u06d4", " دوسرا\u06d4"],
        ["Де вона живе.", " \u0407\u0436\u0430к спить!", " \u0404 все."],
        ["Sa Łódź.", " Łukasz spał.", " Żółw!"],
        ["¿Qué hora es?", " ¡Las dos!", " Bien."],
        ["한국어입니다.", " 다음 문장입니다.", " 끝."],
        ["これは文です。", "次の文です\uff01", "「終わり。」", "はい。"],
        ["\u0561\u0575\u0578\u0589", " \u0535\u0580\u056f\u0578\u0582\u0589"],
        ["ይህ ዓረፍተ ነገር ነው።", " ሁለተኛ።"],
        ["これは。", " 間に空白。"],
    ],
)
def test_sentences_end_at_the_stops_of_their_script(sentences) -> None:
    text = "".join(sentences)
    ends = [0, *sentence_ends(text)]
    assert [text[a:b] for a, b in itertools.pairwise(ends)] == sentences


def compared(text: Path, *folders: Path, more: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
    """The table of `tokenizer compare`, by tokenizer and heading."""
    header, *rows = run("tokenizer", "compare", text, *folders, *more).splitlines()
    headings = re.split(" {2,}", header.strip())
    cells = [re.split(" {2,}", row.strip()) for row in rows]
    return {row[0]: dict(zip(headings, row, strict=True)) for row in cells}


def test_compare_counts_tokens_unknown_words_and_lost_characters_of_each(tmp_path) -> None:
    kinds = {"kept": (), "stripped": ("--strip-accents",), "bytes": ()}
    for name, options in kinds.items():
        (tmp_path / name).mkdir()
        kind = "bpe" if name == "bytes" else "wordpiece"
        trained(tmp_path / name, VIETNAMESE, *options, kind=kind, size=300)
    text = tmp_path / "other.txt"
    text.write_text(f"{VIETNAMESE}\n\n{VIETNAMESE} \u16a0\u16a2 {VIETNAMESE}", encoding="utf-8")
    folders = [tmp_path / name / "out" for name in kinds]
    rows = compared(text, *folders)
    words = text.read_text(encoding="utf-8").split()
    for folder in folders:
        theirs = AutoTokenizer.from_pretrained(folder)
        joined = " ".join(words)
        tokens = len(theirs(f" {joined}", add_special_tokens=False)["input_ids"])
        row = rows[str(folder)]
        assert row["tokens/word"] == f"{tokens / len(words):.2f}"
        assert row["characters/token"] == f"{len(''.join(words)) / tokens:.2f}"
        share = 0 if folder == folders[2] else 1 / len(words)
        assert row["unknown words"] == f"{share:.2%}"
    assert rows[str(folders[0])]["lost characters"] == "0.00%"
    assert rows[str(folders[2])]["lost characters"] == "0.00%"
    assert re.fullmatch(r"\d+\.\d\d% \(.* of Latin\)", rows[str(folders[1])]["lost characters"])


def test_compare_reads_text_as_a_build_does_and_counts_unknown_pieces_of_unigram(tmp_path) -> None:
    trained(tmp_path, ENGLISH, kind="unigram", size=28)
    (tmp_path / "rows.jsonl").write_text('{"body": "Plain \u16a0 words"}\n', encoding="utf-8")
    rows = compared(tmp_path / "rows.jsonl", tmp_path / "out", more=("--field", "body"))
    assert rows[str(tmp_path / "out")]["unknown words"] == "33.33%"


def test_compare_says_what_it_cannot_read(tmp_path) -> None:
    trained(tmp_path, ENGLISH)
    (tmp_path / "empty.txt").write_text(" \n")
    for words, message in (
        ((tmp_path / "empty.txt", tmp_path / "out"), "holds no words"),
        ((tmp_path / "text.txt", tmp_path), "holds no tokenizer"),
        ((tmp_path / "none.txt", tmp_path / "out"), "none.txt"),
    ):
        done = CliRunner().invoke(main, ["tokenizer", "compare", *map(str, words)])
        assert done.exit_code == 1
        assert message in done.output
        assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "sentences",
    [
        ["Das gilt z.B. Für Hr. Meier bzw. Frau Roth, vgl. Abb. 3 und Nr. 5.", " Ja."],
        ["Voir p.ex. M. Dupont et Mme. Curie, p. 3.", " Fin."],
        ["La Sra. López, pág. 12.", " Fin."],
        ["См. рис. 3 и ул. Ленина, т.е. Дом.", " Да."],  # noqa: RUF001
        ["Див. вул. Лесі.", " Так."],
        ["བོད།", " ཡིག།"],
    ],
)
def test_sentences_do_not_end_at_the_abbreviations_of_other_languages(sentences) -> None:
    test_sentences_end_at_the_stops_of_their_script(sentences)


def test_long_sentences_are_cut_at_the_commas_of_their_script() -> None:
    text = "\u5b57" * 600 + "\uff0c" + "\u5b57" * 600
    assert sentence_ends(text) == [601, 1201]


def test_unknown_tokens_are_reported_with_their_share(tmp_path) -> None:
    """Also words of more characters than WordPiece looks at."""
    trained(tmp_path, ENGLISH)
    build = ("data", "build", tmp_path / "new.txt", "--tokenizer", tmp_path / "out")
    texts = {"known": ENGLISH, "hindi": f"{ENGLISH} {HINDI}", "long": f"{ENGLISH} {'a' * 101}"}
    reports = {}
    for name, text in texts.items():
        (tmp_path / "new.txt").write_text(text, encoding="utf-8")
        reports[name] = run(*build, "--out", tmp_path / name)
    assert "unknown to the tokenizer" not in reports["known"]
    for name in ("hindi", "long"):
        (line,) = (one for one in reports[name].splitlines() if "unknown to" in one)
        assert re.match(r"warning: \d+\.\d+% of the tokens are unknown to the tokenizer", line)
        assert "tandem tokenizer compare" in line


def test_text_without_full_stops_is_told(tmp_path) -> None:
    trained(tmp_path, THAI, kind="bpe", size=300)
    built = ("data", "build", tmp_path / "text.txt", "--tokenizer", tmp_path / "out")
    assert "Thai has no full stops: a sentence ends" in run(*built, "--out", tmp_path / "corpus")


def test_folded_case_is_told_and_turkish_is_warned_of(tmp_path) -> None:
    for name, text, options in (
        ("english", ENGLISH, ()),
        ("turkish", "K\u0131z\u0131l\u0131rmak \u0131rma\u011f\u0131", ()),
        ("cased", "K\u0131z\u0131l\u0131rmak \u0131rma\u011f\u0131", ("--cased",)),
    ):
        (tmp_path / name).mkdir()
        output = trained(tmp_path / name, text, *options)
        assert ("case is folded; --cased keeps capitals" in output) == (name != "cased")
        assert ("looks Turkish" in output) == (name == "turkish")


def test_tasks_from_prose_say_what_another_language_lacks(tmp_path, capsys) -> None:
    from data_pipeline.task_files.prose_tasks import main as make

    text = tmp_path / "in.txt"
    text.write_text("\n\n".join(f"{HINDI} {n} {HINDI} {n}\u0964" for n in range(40)))
    make([str(text), "--out", str(tmp_path / "tasks")])
    output = capsys.readouterr().out
    assert "capitals: no word inside a sentence has one" in output
    assert "has no agreement, which is made of English words: is, was" in output
    text.write_text(THAI)
    with pytest.raises(SystemExit, match="1"):
        make([str(text), "--out", str(tmp_path / "none")])
    assert "has no sentence of 6 to 30 words" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
