"""`tandem embed` against `transformers`: vectors, similarities, neighbours, and bad inputs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from click.testing import CliRunner, Result
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModel,
    AutoTokenizer,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
)

import model
import tandem
from configs.errors import UserError
from data_pipeline.tokenization import tokenizer as tokenization
from data_pipeline.tokenization.vocabularies import from_vocab_txt
from trainer.evaluation.text_vectors import spans_of_words
from trainer.prediction import fine_tuned

RIVER = "He sat on the Bank of the river."
LOAN = "She asked the bank (unbanked) for a loan, and the bank said no."
WORDS = "he sat on the bank of river she asked un ##bank ##ed for a loan and said no . , ( )"
PIECES = re.split(" ", WORDS)
SIZES = {"hidden_size": 16, "layers": 2, "heads": 2, "ffn_size": 24, "max_positions": 48}


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*specials, *PIECES]) + "\n")
    tokenization.save(*from_vocab_txt(folder / "vocab.txt", {}), folder)
    config = model.EncoderConfig(vocab_size=5 + len(PIECES), initializer_range=0.5, **SIZES)
    model.save_pretrained(model.build(config, seed=1), folder)
    return folder


@pytest.fixture(scope="module")
def roberta(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("roberta")
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([RIVER, LOAN], vocab_size=290, special_tokens=specials)
    trained.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    roles = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>"}
    PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, mask_token="<mask>", unk_token="<unk>",
        **{f"{role}_token": token for role, token in roles.items()},
    ).save_pretrained(folder)  # fmt: skip
    config = model.EncoderConfig(
        vocab_size=trained.get_vocab_size(), positions="learned_after_padding", pad_token_id=1,
        segment_types=1, norm_eps=1e-5, initializer_range=0.5, **SIZES,
    )  # fmt: skip
    assert model.save_pretrained(model.build(config, seed=1), folder) == ""
    return folder


def embed(*arguments: object) -> Result:
    return CliRunner().invoke(tandem.main, ["embed", *map(str, arguments)])


def found(*arguments: object) -> dict:
    result = embed(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def expected(folder: Path, text: str) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]:
    """From `transformers`: last hidden states and word embeddings [L, H], and offsets."""
    read = AutoTokenizer.from_pretrained(folder)(
        text, return_tensors="pt", return_offsets_mapping=True, return_token_type_ids=False
    )
    offsets = read.pop("offset_mapping")[0].tolist()
    theirs = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = theirs(**read).last_hidden_state[0]
        words = theirs.get_input_embeddings()(read["input_ids"])[0]
    return states.numpy(), words.numpy(), offsets


def cosines(vectors: list[np.ndarray]) -> np.ndarray:
    unit = np.stack(vectors).astype(float)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    return unit @ unit.T


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_vectors_and_similarities_of_texts_are_those_of_transformers(family, request) -> None:
    folder = request.getfixturevalue(family)
    reference = [expected(folder, text) for text in (RIVER, LOAN)]
    pooled = {
        "cls": [states[0] for states, _, _ in reference],
        "mean": [states.mean(axis=0) for states, _, _ in reference],
        "static": [words[1:-1].mean(axis=0) for _, words, _ in reference],
    }
    for pooling, vectors in pooled.items():
        got = found(folder, RIVER, LOAN, "--pooling", pooling)
        assert [one["text"] for one in got["vectors"]] == [RIVER, LOAN]
        assert [one["tokens"] for one in got["vectors"]] == [len(one[0]) for one in reference]
        for own, theirs in zip(got["vectors"], vectors, strict=True):
            np.testing.assert_allclose(own["vector"], theirs, rtol=1e-4, atol=1e-5)
        for name, values in pooled.items():
            np.testing.assert_allclose(got["similarities"][name], cosines(values), atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("word", ["bank", "unbanked"])
def test_a_words_vector_is_the_mean_of_its_pieces_where_it_stands(family, word, request) -> None:
    folder = request.getfixturevalue(family)
    texts = [RIVER, LOAN] if word == "bank" else [LOAN]
    got = found(folder, *texts, "--word", word)
    places = [(one["number"], one["character"]) for one in got["vectors"]]
    assert places == ([(1, 15), (2, 15), (2, 51)] if word == "bank" else [(1, 21)])
    for one in got["vectors"]:
        states, _, offsets = expected(folder, one["text"])
        start = one["character"] - 1
        end = start + len(word)
        inside = [i for i, (s, e) in enumerate(offsets) if start <= s < end and s < e <= end]
        assert len(inside) > 1 or word == "bank"
        # RoBERTa's offsets of a word's first piece may begin at the space before it.
        pieces = inside or [i for i, (s, e) in enumerate(offsets) if start - 1 <= s < e <= end]
        np.testing.assert_allclose(one["vector"], states[pieces].mean(axis=0), rtol=1e-4, atol=1e-5)


def test_cls_is_compared_with_the_words_of_its_text(bert) -> None:
    states, _, offsets = expected(bert, RIVER)
    (one,) = found(bert, RIVER)["vectors"]
    assert [word["word"] for word in one["words"]] == RIVER.removesuffix(".").split()
    for word in one["words"]:
        place = [start for start, _ in offsets[1:-1]].index(word["character"] - 1) + 1
        right = cosines([states[0], states[place]])[0, 1]
        assert word["cls_similarity"] == pytest.approx(right, abs=1e-5)
    assert "cosine of [CLS] with the words: He " in embed(bert, RIVER, "--pooling", "cls").stdout


def test_static_vectors_from_a_file(bert, tmp_path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("3 2\nbank 1 0\nriver 0 2\nloan 3 4\n")
    got = found(bert, RIVER, LOAN, "--vectors", file, "--pooling", "static")
    first, second = (one["vector"] for one in got["vectors"])
    assert (first, second) == ([0.5, 1.0], pytest.approx([5 / 3, 4 / 3]))
    assert np.allclose(got["similarities"]["static"], cosines([np.array(first), np.array(second)]))
    got = found(bert, RIVER, LOAN, "--vectors", file, "--pooling", "static", "--word", "bank")
    assert [one["vector"] for one in got["vectors"]] == [[1.0, 0.0]] * 3
    refused = embed(bert, "she said no", "--vectors", file)
    assert refused.exit_code == 1
    assert "text 1: " in refused.stderr
    assert "words.txt has no vector of any of its words" in refused.stderr


def test_neighbours_are_the_closest_of_the_other_words(bert) -> None:
    got = found(bert, RIVER, LOAN, "--word", "bank")
    states, _, offsets = expected(bert, RIVER)
    first = got["vectors"][0]
    river = next(i for i, (s, e) in enumerate(offsets) if RIVER[s:e] == "river")
    listed = {one["word"]: one["similarity"] for one in first["neighbours"]}
    assert len(listed) == 5
    assert "bank" not in {word.lower() for word in listed}
    assert list(listed.values()) == sorted(listed.values(), reverse=True)
    if "river" in listed:
        vectors = [np.array(first["vector"]), states[river]]
        assert listed["river"] == pytest.approx(cosines(vectors)[0, 1], abs=1e-4)
    whole = found(bert, "bank of river.", "bank sat", "--word", "bank")["vectors"]
    assert {one["word"] for one in whole[0]["neighbours"]} == {"of", "river", "sat"}
    static = found(bert, RIVER, LOAN, "--word", "bank", "--pooling", "static")["vectors"]
    assert static[0]["vector"] == static[1]["vector"] == static[2]["vector"]
    assert static[0]["neighbours"] == static[1]["neighbours"]
    assert first["neighbours"] != got["vectors"][1]["neighbours"]


def test_what_a_person_reads(bert) -> None:
    lines = embed(bert, RIVER, LOAN).stdout.splitlines()
    assert lines[0] == f"text 1: {RIVER}"
    assert lines[-2].split() == ["cosine", "similarity", "cls", "mean", "static"]
    cells = lines[-1].split()
    matrices = found(bert, RIVER, LOAN)["similarities"]
    assert cells[:4] == ["text", "1", "-", "text"]
    assert cells[5:] == [f"{matrices[name][0][1]:.3f}" for name in ("cls", "mean", "static")]
    said = embed(bert, RIVER, LOAN, "--word", "bank").stdout
    assert "Bank in text 1: He sat" in said
    assert "bank in text 2, character 51" in said
    assert "nearest words: " in said
    assert "similarity" not in embed(bert, RIVER).stdout


def test_a_given_word_may_hold_spaces_and_marks() -> None:
    text = "In New York (U.S.A.) it's newyork."
    words = lambda word: [text[a:b] for a, b in spans_of_words(text, word)]  # noqa: E731
    assert words("") == ["In", "New", "York", "U", "S", "A", "it's", "newyork"]
    assert words("new york") == ["In", "New York", "U", "S", "A", "it's", "newyork"]
    assert words("U.S.A.") == ["In", "New", "York", "U.S.A.", "it's", "newyork"]
    text = "\u0939\u093f\u0928\u094d \u0939\u093f"  # Hindi, whose first letters are also a word
    assert words("\u0939\u093f") == words("") == text.split()
    assert words("\u0939\u093f\u0928") == text.split(), "is no word of the text"


def test_a_text_of_another_encoding_is_read(bert) -> None:
    text = "the caf\udce9"  # as Python reads Latin-1's é from the command line
    assert "text 1: the caf?" in embed(bert, text).stdout
    assert found(bert, text, "--word", "caf\udce9")["vectors"][0]["text"] == "the caf?"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([RIVER, "no loan", "--word", "bank"], 1, "text 2: the word 'bank' is not in it"),
        ([RIVER, "  "], 1, "text 2: is empty"),
        (["no " * 50], 1, "text 1: has 52 tokens, and the model reads 48"),
        ([RIVER, "--word", " "], 2, "--word: must not be empty"),
        ([RIVER, "--word", "the", "--pooling", "cls"], 2, "is of whole texts"),
        ([], 2, "Missing argument 'TEXT...'"),
    ],
)
def test_what_cannot_be_is_one_line(bert, arguments, code, message) -> None:
    result = embed(bert, *arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert code == 2 or result.stderr.count("\n") == 1


def test_from_python_a_wrong_pooling_or_text_is_one_line(bert) -> None:
    with pytest.raises(UserError, match=r"^--pooling: 'max': must be one of cls, mean,"):
        tandem.embed(bert, [RIVER], pooling="max")
    with pytest.raises(UserError, match=r"^item 1: must be text, not None$"):
        tandem.embed(bert, [RIVER, None])  # type: ignore[list-item]
    assert tandem.embed(bert, []).shape == (0, tandem.embed(bert, [RIVER]).shape[1])


def test_a_folder_without_tokenizer_or_model_is_named(bert, tmp_path) -> None:
    assert f"{tmp_path}/config.json: not found" in embed(tmp_path, "a").stderr
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((bert / name).read_bytes())
    assert f"{tmp_path}: holds no tokenizer" in embed(tmp_path, "a").stderr
    tree = json.loads((bert / "tokenizer.json").read_text())
    tree["model"]["vocab"]["zebra"] = len(PIECES) + 5
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    assert "its tokenizer has more tokens than its model" in embed(tmp_path, "zebra").stderr


def test_a_text_is_cut_where_sentence_transformers_cuts_it(bert, tmp_path) -> None:
    from sentence_transformers import SentenceTransformer

    shutil.copytree(bert, folder := tmp_path / "cut")
    SentenceTransformer(str(folder), device="cpu").save(str(folder))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    (texts := tmp_path / "a.txt").write_text(f"{LOAN}\nno\n")
    done = embed(folder, texts, "--pooling", "mean")
    ours = [json.loads(line)["vector"] for line in done.stdout.splitlines()]
    theirs = SentenceTransformer(str(folder), device="cpu").encode([LOAN, "no"])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert "and the model reads 9; shorten it" in embed(folder, LOAN).stderr
    model.import_folder(folder, tmp_path / "imported")
    assert embed(tmp_path / "imported", texts, "--pooling", "mean").stdout == done.stdout


def vectors_alone(folder: Path, texts: list[str], pooling: str) -> list[np.ndarray]:
    return [
        np.array(found(folder, text, "--pooling", pooling)["vectors"][0]["vector"])
        for text in texts
    ]


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "static"])
def test_a_file_has_the_vectors_of_its_texts(family, pooling, request, tmp_path) -> None:
    """In batches, in order, a row for each line, as those of the texts alone."""
    folder = request.getfixturevalue(family)
    texts = [RIVER, "", LOAN, "no", "   ", "the bank", RIVER]
    wanted = [vectors_alone(folder, [text], pooling)[0] if text.strip() else None for text in texts]
    (plain := tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in texts))
    (table := tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"body": text}) + "\n" for text in texts)
    )
    for source, more, given in (
        (plain, (), None),
        ("-", (), plain.read_text()),
        (table, ("--column", "text=body"), None),
    ):
        words = ["embed", str(folder), str(source), "--pooling", pooling, *more]
        done = CliRunner().invoke(tandem.main, words, input=given)
        assert done.exit_code == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert [line["row"] for line in lines] == [*range(1, 8)]
        out = tmp_path / f"{Path(str(source)).name}.npy"
        done = CliRunner().invoke(tandem.main, [*words, "--out", str(out)], input=given)
        assert done.exit_code == 0, done.stderr
        array = np.load(out)
        assert (array.dtype, array.shape) == (np.float32, (7, SIZES["hidden_size"]))
        for line, row, vector in zip(lines, array, wanted, strict=True):
            if vector is None:
                assert line["vector"] is None
                assert np.isnan(row).all()
                continue
            np.testing.assert_allclose(line["vector"], vector, rtol=0, atol=1e-6)
            np.testing.assert_allclose(row, vector, rtol=0, atol=1e-6)


def test_many_texts_are_embedded_in_batches(bert, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(fine_tuned, "AT_ONCE", 16)
    monkeypatch.setattr(fine_tuned, "tokens_per_pass", lambda device: 64)
    words = [piece for piece in PIECES if piece.isalpha()]
    texts = [" ".join(words[number % 7 : 8 + number % 5]) for number in range(1500)]
    texts[700] = " ".join(words * 10)
    (path := tmp_path / "a.txt").write_text("\n".join(texts))
    done = embed(bert, path, "--out", tmp_path / "a.npy")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == ""
    array = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert len(array) == 1500
    assert f"{path}: texts too long for 48 tokens, whose ends are not read: 1" in caplog.text
    for number in (0, 17, 1499):
        (alone,) = vectors_alone(bert, [texts[number]], "mean")
        np.testing.assert_allclose(array[number], alone, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_pipe_of_texts_is_answered_while_it_is_written(bert) -> None:
    command = [sys.executable, "-m", "tandem", "embed", str(bert), "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        for row, text in enumerate((RIVER, LOAN), start=1):
            process.stdin.write(f"{text}\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["row"] == row
        assert process.communicate(timeout=60)[0] == ""


def test_a_decoder_is_named_since_its_first_token_sees_no_text(
    roberta: Path, tmp_path: Path, caplog
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(roberta)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 48}
    config = GPT2Config(vocab_size=len(tokenizer), pad_token_id=1, **sizes)
    for part in (GPT2Model(config), tokenizer):
        part.save_pretrained(tmp_path / "gpt")
    (texts := tmp_path / "texts.txt").write_text(f"{RIVER}\n{LOAN}\n")
    for words in ([RIVER, LOAN], [texts]):
        caplog.clear()
        assert embed(tmp_path / "gpt", *words).exit_code == 0
        assert f"{tmp_path / 'gpt'}: is a decoder: a token sees only those before it" in caplog.text
    caplog.clear()
    embed(roberta, texts)
    assert "decoder" not in caplog.text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["a b", "c", "--out", "v.npy"], 2, "--out: needs one file of texts"),
        (["a b", "--column", "text=1"], 2, "--column: needs one file of texts"),
        (["-", "--word", "bank"], 2, "--word: is for texts as arguments"),
        (["-", "--vectors", "glove.txt"], 2, "--vectors: is for texts as arguments"),
        (["none.txt", "--out", "v.npy"], 2, "--out: needs one file of texts, or -, not none.txt"),
    ],
)
def test_options_of_files_and_of_texts(bert, tmp_path, monkeypatch, words, code, message) -> None:
    monkeypatch.chdir(tmp_path)
    done = embed(bert, *words)
    assert done.exit_code == code, done.output
    assert message in done.stderr
    assert not list(tmp_path.iterdir()), "nothing is left"


@pytest.mark.parametrize("pooling", ["mean", "cls", "static"])
def test_a_pass_is_waited_for_once_and_not_for_each_text(bert, monkeypatch, pooling):
    copied, to_host = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copied.append(x.shape) or to_host(x))
    vocabulary = tokenization.load(bert)[1]
    texts = [[np.arange(5, 5 + length)] for length in (3, 5, 4)]
    vectors = fine_tuned.text_vectors(model.from_pretrained(bert), vocabulary, texts, pooling)
    assert [vector.shape for vector in vectors] == [(16,)] * 3
    assert copied == [(3, 16)]
