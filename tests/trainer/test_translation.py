"""Translation: the task's files, its loss, its BLEU, whole jobs, and `tandem predict`."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn import functional as F

import configs
import tandem
from configs import ConfigError
from data_pipeline import MASKED, Corpus, DataError, ExampleSplit, TextEncoder
from data_pipeline.task_files.parallel import SOURCE, TARGET, Languages, read_pairs
from model import Ability, build, from_pretrained, save_pretrained
from model.kinds.seq2seq import Seq2SeqConfig
from tests.distributed import run_distributed
from tests.trainer import jobs
from trainer.batches import to_device
from trainer.config import JobConfig
from trainer.footprint.footprint import footprints_and_passes
from trainer.job_data.examples import with_examples
from trainer.objectives.row_losses import cross_entropy_rows
from trainer.objectives.task import Part
from trainer.objectives.vocabulary import project_and_sum
from trainer.run_folder.folder import RunFolder
from trainer.task_facts import TaskFacts, write_facts
from trainer.tasks.translation import BleuMetric, References, Translation, bleu_counts, bleu_of

WORDS = ["the", "of", "and", "to", "in", "was", "his"]
OTHERS = ["is", "that", "with", "he", "as", "had", "it"]  # each word's translation
JOB = """
name: words
steps: 6
output_dir: {folder}/runs
data:
  {{root: {folder}, train: train.xx.gz, validation: held_out.xx, sequence_length: 20,
  tokenizer: {corpus}/tokenizer}}
batch: {{size: 8, micro_batch: 3}}
teacher:
  model:
    {{kind: seq2seq, hidden_size: 16, layers: 1, decoder_layers: 1, heads: 2, ffn_size: 32,
    vocab_size: 600, max_positions: 20}}
  objective:
    translation: {{source_language: xx, target_language: yy, beams: 2, max_length: 8}}
  optimizer: {{learning_rate: 1.0e-2}}
students:
  small:
    model:
      {{kind: recurrent_seq2seq, hidden_size: 8, layers: 1, vocab_size: 600}}
    objective:
      translation: {{source_language: xx, target_language: yy, beams: 2, max_length: 8}}
      soft_kl: {{temperature: 2.0}}
evaluation: {{every: 3}}
checkpoint: {{every: 3}}
log: {{every: 1, wandb: disabled}}
"""


def lines(count: int, shift: int, words: list[str]) -> str:
    texts = [
        " ".join(words[(number * step) % 7] for step in range(1, 2 + number % 4))
        for number in range(shift, shift + count)
    ]
    return "".join(f"{text}\n" for text in texts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("translation")
    for language, words in (("xx", WORDS), ("yy", OTHERS)):
        with gzip.open(folder / f"train.{language}.gz", "wt") as file:
            file.write(lines(40, 0, words))
        (folder / f"held_out.{language}").write_text(lines(13, 100, words))
    return folder


def load(folder: Path, corpus: Path, *overrides: str) -> JobConfig:
    text = JOB.format(folder=folder, corpus=corpus)
    return configs.load_text(text, JobConfig, "job", overrides, "job.yaml")


def trained(folder: Path, corpus: Path, name: str, stop: int | None = None) -> str:
    """The folder of the finished run, which was stopped and resumed where there is a `stop`."""
    job = with_examples(load(folder, corpus, f"name={name}"))
    if stop:
        jobs.run(job, stop_after=stop)
    run = jobs.run(job)
    jobs.finish(run)
    return str(run.path)


@pytest.fixture(scope="module")
def run(folder, corpus) -> RunFolder:
    return RunFolder(Path(run_distributed(trained, 2, folder, corpus, "two")[0]))


def test_pairs_of_parallel_files_and_of_a_table_are_batched_alike(folder, corpus, tmp_path) -> None:
    pairs = list(
        zip(lines(40, 0, WORDS).split("\n"), lines(40, 0, OTHERS).split("\n"), strict=True)
    )
    rows = [{"source": one, "english": other} for one, other in pairs if one]
    table = tmp_path / "train.jsonl"
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    more = [f"data.train={table}", 'data.validation=""', "data.validation_fraction=0.5"]
    batches = []
    for extra in ([], [*more, "data.columns={target: english}"]):
        job = with_examples(load(folder, corpus, *extra))
        batches.append(ExampleSplit(Corpus.open(job.data.path), "train"))
    trained = [number for number in range(40) if Part(False, 0.5).has(number)]
    (whole, half) = batches
    assert (whole.total, half.total) == (40, 20)
    numbers = np.arange(4)
    one, other = whole.batch(np.array(trained[:4]), numbers * 0), half.batch(numbers, numbers * 0)
    assert np.array_equal(one.input_ids, other.input_ids)
    tokenizer = TextEncoder(corpus / "tokenizer", 20)
    vocabulary = tokenizer.vocabulary
    for row, (source, target) in enumerate(pairs[number] for number in trained[:4]):
        for side, text in enumerate((source, target)):
            ids = [vocabulary.cls, *tokenizer.encode(text, "").ids, vocabulary.sep]
            assert one.input_ids[row, side, : len(ids)].tolist() == ids
            assert one.attention_mask[row, side].sum() == len(ids)
        labels = one.targets[MASKED].labels[row]
        assert labels[labels >= 0].tolist() == ids[1:]


def test_the_position_of_a_label_is_that_of_its_token_in_any_part_of_a_batch(
    folder, corpus
) -> None:
    job = with_examples(load(folder, corpus))
    batch = ExampleSplit(Corpus.open(job.data.path), "train").batch(np.arange(9), np.zeros(9, int))
    for rows in (slice(0, 9), slice(4, 5)):
        micro = to_device(batch.take(rows).trimmed(), torch.device("cpu"))
        target = micro.targets[MASKED]
        assert target.positions is not None
        is_label = target.labels >= 0
        at = micro.input_ids.flatten()[target.positions]
        assert torch.equal(at[is_label], target.labels[is_label])
        rows_of = target.positions[is_label] // micro.input_ids.shape[1]
        assert set((rows_of % 2).tolist()) == {1}, "only targets are predicted"


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_label_smoothing_is_torchs(smoothing: float) -> None:
    drawn = torch.Generator().manual_seed(0)
    x, weight = torch.randn(7, 5, generator=drawn), torch.randn(11, 5, generator=drawn)
    labels = torch.tensor([1, 4, -100, 10, 0, 7, -100])

    def gradients(loss: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        return [loss, *torch.autograd.grad(loss, (x, weight))]

    ours = x.clone().requires_grad_(), weight.clone().requires_grad_()
    rows = cross_entropy_rows(labels, smoothing)
    found = gradients(project_and_sum(ours[0], (ours[1], None), [rows])[0], *ours)
    theirs = x.clone().requires_grad_(), weight.clone().requires_grad_()
    logits = theirs[0] @ theirs[1].t()
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(found, gradients(loss, *theirs))


def test_bleu_of_parts_is_that_of_sacrebleus_command(tmp_path) -> None:
    right = ["A dog runs over the snow.", "Two men, sitting.", "A man in a hat", "It is red ."]
    found = ["a dog runs across the snow .", "Two men sitting.", "A man in the hat", "It is blue."]
    for name, texts in (("right", right), ("found", found)):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts))
    for flags in ([], ["-lc"]):
        parts = [
            bleu_counts(found[rows], right[rows], lowercase=bool(flags))
            for rows in (slice(0, 1), slice(1, 4))
        ]
        ours = bleu_of([sum(column) for column in zip(*parts, strict=True)])
        command = [sys.executable, "-m", "sacrebleu", "right", "-i", "found", "-b", "-w", "6"]
        told = subprocess.run([*command, *flags], cwd=tmp_path, capture_output=True, check=True)
        assert ours == pytest.approx(float(told.stdout), abs=1e-6)


@pytest.mark.slow
def test_a_job_on_two_ranks_is_that_of_one_and_of_one_that_resumes(folder, corpus, run) -> None:
    alone = RunFolder(Path(run_distributed(trained, 1, folder, corpus, "one", 4)[0]))
    for name in ("teacher", "students/small"):
        curves = [
            {(step, key): value for step, key, value in jobs.curve(one, name) if "loss" in key}
            for one in (run, alone)
        ]
        assert curves[0].keys() == curves[1].keys()
        assert list(curves[0].values()) == pytest.approx(list(curves[1].values()), rel=1e-4)
    losses = [v for _, k, v in jobs.curve(run, "teacher") if k == "teacher/loss"]
    assert losses[-1] < losses[0]
    for one in (run, alone):
        results = json.loads(one.evaluation.read_text())
        assert results["metric"] == "bleu"
        assert {"bleu", "loss", "accuracy"} <= results["learners"]["students/small"].keys()


@pytest.mark.slow
def test_predictions_are_those_that_were_scored(run, folder, tmp_path) -> None:
    exported = run.path / "exports" / "teacher"
    (tmp_path / "some.txt").write_text((folder / "held_out.xx").read_text())
    runner = CliRunner()
    found = []
    for source in (folder / "held_out.xx", tmp_path / "some.txt"):
        told = runner.invoke(tandem.main, ["predict", str(exported), str(source)])
        assert told.exit_code == 0, told.output
        found.append([json.loads(line)["translation"] for line in told.output.splitlines()])
    assert found[0] == found[1]
    right = (folder / "held_out.yy").read_text().splitlines()
    results = json.loads(run.evaluation.read_text())["learners"]["teacher"]
    assert results["bleu"] == pytest.approx(bleu_of(bleu_counts(found[0], right, False)))
    assert Ability.GENERATE in from_pretrained(exported).config.abilities
    told = runner.invoke(tandem.main, ["predict", str(exported), str(source), "--head", "x"])
    assert told.exit_code == 2
    assert "--head: is for heads of tasks" in told.output


@pytest.mark.slow
def test_a_plan_runs_the_job_on_fake_tensors(folder, corpus) -> None:
    job = with_examples(load(folder, corpus))
    found = footprints_and_passes(job, "gpu", 20)[0]
    assert found["teacher"].forward_flops > found["students/small"].forward_flops > 0


LANGUAGES = Languages("xx", "yy")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.xx": "the\nof\n", "a.yy": "is\n"}, "a.yy: ends after 1 line, and .*a.xx does not"),
        ({"a.xx": "the\n", "a.yy": "is\nit\n"}, "a.xx: ends after 1 line, and .*a.yy does not"),
        ({"a.xx": "", "a.yy": ""}, "a.xx: holds no lines"),
        ({"a.xx": "the\n"}, "a.yy: "),
        ({"a.zz": "the\n"}, "a.zz: is no table .* and its name does not have .source_language"),
    ],
)
def test_files_that_are_not_parallel_are_refused(tmp_path, files, message) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        list(read_pairs(str(tmp_path / next(iter(files))), {}, LANGUAGES))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("the\n", " \n"), "bad.xx:1: a text is empty; remove the example"),
        (("the\n" + "of " * 12, "is\n" + "he " * 9), "bad.xx:2: source and target have 33 tokens"),
    ],
)
def test_pairs_that_cannot_be_read_are_refused(folder, corpus, texts, message) -> None:
    for language, text in zip(("xx", "yy"), texts, strict=True):
        (folder / f"bad.{language}").write_text(text)
    with pytest.raises(DataError, match=message):
        with_examples(load(folder, corpus, "data.train=bad.xx"))


def test_texts_are_translated_from_python_too_and_one_without_a_token_is_none(
    corpus, tmp_path
) -> None:
    sizes = {"hidden_size": 16, "layers": 1, "decoder_layers": 1, "heads": 2, "ffn_size": 32}
    config = Seq2SeqConfig(vocab_size=600, max_positions=20, **sizes)
    save_pretrained(build(config, seed=0), tmp_path, corpus / "tokenizer")
    settings = {"task": "translation", "max_length": 4}
    facts = TaskFacts((SOURCE, TARGET), sequence_length=20, settings=settings)
    write_facts(tmp_path, {MASKED: facts})
    texts = ["the of and", "\u200b", "in"]
    told = tandem.predict(tmp_path, texts)
    assert [answer["translation"] is None for answer in told] == [False, True, False]
    assert told == tandem.predict(tmp_path, [{SOURCE: text} for text in texts])


def test_a_vocabulary_without_a_token_that_ends_is_refused(folder, corpus, tmp_path) -> None:
    tree = json.loads((corpus / "tokenizer" / "tokenizer.json").read_text())
    tree["added_tokens"] = [one for one in tree["added_tokens"] if one["content"] != "[SEP]"]
    del tree["model"]["vocab"]["[SEP]"]
    tree["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match=r"tokenizer.*sep"):
        with_examples(load(folder, corpus, f"data.tokenizer={tmp_path}"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "students.small.objective.soft_labels={}",
            "soft_labels: a model of kind recurrent_seq2seq cannot have heads for tasks",
        ),
        ("teacher.model.heads=3", "teacher.model.heads: 3 does not divide the width 16"),
        ("teacher.model.pad_token_id=600", "teacher.model.pad_token_id: 600 is outside"),
        ("teacher.model.mlm_head=false", "teacher.model.mlm_head: must be true"),
        ("teacher.zero_stage=3", "teacher.zero_stage: must be 2 or less for a model that translat"),
        (
            'teacher.objective.translation.target_language=""',
            "translation.target_language: set both languages",
        ),
        (
            "teacher.objective.translation.target_language=xx",
            "translation.target_language: is that of the sources",
        ),
        (
            "teacher.objective.translation.target_language=../en",
            "target_language: must be a part of a file's name",
        ),
        ("teacher.objective.translation.length_penalty=1000000", "length_penalty: must be 0 to 10"),
        (
            "students.small.objective.soft_kl.positions=attended",
            "soft_kl: positions must be masked",
        ),
        ("teacher.objective.translation.layers=[1]", "translation.layers: the decoder's last"),
        ("teacher.objective.translation.dropout=0.1", "translation.dropout: is for the head of"),
        (
            "teacher.objective.translation={beams: 1, length_penalty: 0.5}",
            "translation.length_penalty: is for beams, and the search is greedy",
        ),
    ],
)
def test_what_does_not_fit_is_refused(folder, corpus, override, message) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, corpus, override)


def test_a_student_that_generates_nothing_is_refused(folder, corpus) -> None:
    text = JOB.format(folder=folder, corpus=corpus)
    seq2seq = "{kind: recurrent_seq2seq, hidden_size: 8, layers: 1, vocab_size: 600}"
    assert seq2seq in text
    text = text.replace(
        seq2seq, "{kind: encoder, hidden_size: 8, heads: 2, layers: 1, vocab_size: 600}"
    )
    with pytest.raises(
        ConfigError, match=r"students.small.view: a model of kind encoder has no decoder"
    ):
        configs.load_text(text, JobConfig, "job", (), "job.yaml")


def test_a_model_that_generates_is_refused_in_a_job_that_reads_text(corpus, tmp_path) -> None:
    student = "students.s={model: {kind: seq2seq, vocab_size: 600}, objective: {mlm: {}}}"
    with pytest.raises(ConfigError, match=r"students.s.model.kind: seq2seq reads pairs of texts"):
        jobs.tiny_job(corpus, tmp_path, student)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "masked_only: a model of kind seq2seq cannot compute its last layer at the masked po"),
        (["teacher.masked_only=false"], "objective.single_sentence: a model of kind seq2seq canno"),
    ],
)
def test_a_folder_whose_model_cannot_do_a_task_is_named(tmp_path, overrides, said) -> None:
    sizes = {"vocab_size": 30, "hidden_size": 8, "layers": 1, "decoder_layers": 1, "heads": 2}
    model = build(Seq2SeqConfig(**sizes, ffn_size=8, max_positions=8), seed=0)
    save_pretrained(model, tmp_path)
    words = ["data.train=x.tsv", f"teacher.init.pretrained={tmp_path}", *overrides]
    with pytest.raises(ConfigError, match=rf"teacher\.{said}.*; init.pretrained is {tmp_path}$"):
        configs.load("single_sentence", JobConfig, "task", words)


def test_bleu_finds_words_as_the_job_says(corpus) -> None:
    task = Translation(bleu_words="char").scored_on(corpus)
    metric = task.own_metrics()[0]
    assert isinstance(metric, BleuMetric)
    assert metric.splitting == "char"


@pytest.mark.parametrize(
    ("texts", "splitting"),
    [
        (["a dog ."], "13a"),
        (["\u4e00\u53ea\u72d7\u3002"], "zh"),
        (["\u72ac\u304c\u3044\u308b"], "char"),
    ],
)
def test_bleu_finds_words_as_the_script_of_the_references_has_them(texts, splitting) -> None:
    references = References(lambda: texts, Path())
    assert references.splitting == splitting
    wrong = [texts[0][:-1] + "x"]
    score = bleu_of(bleu_counts(wrong, texts, False, references.splitting))
    expected = sacrebleu.corpus_bleu(wrong, [texts], tokenize=splitting, force=True).score
    assert score == pytest.approx(expected)
    assert (score > 0) or splitting == "13a"
