"""Fine-tuning from folders of `transformers`: their tokenizers go with the model, as they are."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import torch
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
)

from data_pipeline.reading.corpus import Corpus
from data_pipeline.tokenization.tokenizer import load
from model import from_pretrained
from tests.conftest import tandem

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 24, "max_position_embeddings": 40}  # fmt: skip
ROWS = [f"patient {n} has covid-19 and \u00e9ryth\u00e8me today\t{n % 2}" for n in range(16)]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "patient", "has", "and", "today", "covid",
         "erytheme", "-", "##s", *(str(n) for n in range(20))]  # fmt: skip


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "table.tsv").write_text("\n".join(["text\tlabel", *ROWS]) + "\n", encoding="utf-8")
    return tmp_path / "table.tsv"


def finetuned(model: Path, table: Path, *more: str) -> Path:
    """The export of a model that is fine-tuned on the table."""
    few = [f"output_dir={table.parent}/runs", "epochs=null", "steps=2", "batch.size=8",
           "data.sequence_length=16", "log.wandb=disabled", f"data.train={table}"]  # fmt: skip
    done = tandem("finetune", "single_sentence", "--model", model, *few, *more)
    assert done.returncode == 0, done.stderr
    return table.parent / f"runs/single_sentence-{model.name}/exports/teacher"


def bert_folder(folder: Path, **config: bool) -> Path:
    """A BERT of `transformers` with its vocab.txt."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    said = {"tokenizer_class": "BertTokenizer", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    BertForMaskedLM(BertConfig(vocab_size=len(WORDS), **SIZES)).save_pretrained(folder)
    return folder


def ids_of_transformers(folder: Path) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(folder)(ROWS[0])["input_ids"]
    return ids


def test_a_domain_s_new_words_stay_whole_from_import_to_export(tmp_path: Path, table) -> None:
    theirs = bert_folder(tmp_path / "theirs")
    tokenizer = AutoTokenizer.from_pretrained(theirs)
    assert tokenizer.add_tokens(["covid-19", "\u00e9ryth\u00e8me"]) == 2
    grown = BertForMaskedLM.from_pretrained(theirs)
    grown.resize_token_embeddings(len(tokenizer))
    grown.save_pretrained(tmp_path / "grown")
    tokenizer.save_pretrained(tmp_path / "grown")
    done = tandem("import", tmp_path / "grown", "--out", tmp_path / "imported")
    assert done.returncode == 0, done.stderr
    export = finetuned(tmp_path / "imported", table)
    expected = tokenizer(ROWS[0])["input_ids"]
    assert set(expected) >= {len(WORDS), len(WORDS) + 1}, "both words are one token each"
    assert ids_of_transformers(export) == expected
    assert load(export)[0].encode(ROWS[0]).ids == expected
    ids = torch.tensor([expected])
    right = AutoModelForSequenceClassification.from_pretrained(export).eval()(ids).logits
    assert right.shape == (1, 2)
    assert from_pretrained(export).config.vocab_size == len(WORDS) + 2


def test_a_folder_with_only_spiece_model_is_fine_tuned(tmp_path: Path, table) -> None:
    folder, file = tmp_path / "albert", io.BytesIO()
    roles = {"pad_piece": "<pad>", "control_symbols": ["[CLS]", "[SEP]", "[MASK]"]}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ROWS), model_writer=file, vocab_size=50, pad_id=0, unk_id=1,
        bos_id=-1, eos_id=-1, minloglevel=2, hard_vocab_limit=False, **roles,
    )  # fmt: skip
    size = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue()).get_piece_size()
    config = AlbertConfig(vocab_size=size, embedding_size=8, **SIZES)
    AlbertForMaskedLM(config).save_pretrained(folder)
    (folder / "spiece.model").write_bytes(file.getvalue())
    assert ids_of_transformers(finetuned(folder, table)) == ids_of_transformers(folder)


def test_tokenizers_of_one_vocabulary_do_not_share_encoded_examples(tmp_path: Path, table) -> None:
    exports = [
        finetuned(bert_folder(tmp_path / name, strip_accents=name == "plain"), table)
        for name in ("accents", "plain")
    ]
    first, second = (ids_of_transformers(export) for export in exports)
    assert first != second
    corpora = sorted((tmp_path / "runs/examples").glob("*/*/corpus.json"))
    assert len(corpora) == 2
    counts = [Corpus.open(str(path.parent)).token_counts for path in corpora]
    accents = WORDS.index("erytheme")
    assert sorted(int(count[accents]) > 0 for count in counts) == [False, True]
