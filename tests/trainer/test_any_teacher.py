"""A model of `transformers` that Tandem has no code for, as a frozen teacher in whole jobs."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import transformers

import configs
from configs import ConfigError
from model import ModelError, build, import_folder
from tests.conftest import tandem
from tests.distributed import run_distributed
from tests.trainer import jobs
from tests.trainer.test_sentence_tasks import LABELS, lines, write
from trainer.config import JobConfig
from trainer.footprint.footprint import footprints_and_passes
from trainer.job_data.examples import with_examples
from trainer.learners.first_weights import from_folder
from trainer.run_folder.folder import RunFolder

SIZES = {
    "vocab_size": 600, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 48, "initializer_range": 0.3,
}  # fmt: skip
JOB = """
name: any
steps: 4
seed: 3
output_dir: {runs}
data: {{path: {corpus}, sequence_length: 32}}
batch: {{size: 8, micro_batch: 4}}
teacher: {{frozen: true, init: {{pretrained: {teacher}}}}}
students:
  small:
    model: {{layers: 1, hidden_size: 16, heads: 2, ffn_size: 32, vocab_size: 600}}
    objective: {{mlm: {{}}, soft_kl: {{temperature: 2.0}}, hidden_mse: {{}}}}
evaluation: {{every: 4, sequences: 8}}
checkpoint: {{every: 2}}
log: {{every: 1, wandb: disabled}}
"""


@pytest.fixture(autouse=True)
def rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)


@pytest.fixture(scope="module", name="roformer")
def masked_language_model(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("any") / "roformer"
    shutil.copytree(corpus / "tokenizer", folder)
    torch.manual_seed(5)
    config = transformers.RoFormerConfig(**SIZES, embedding_size=12)
    transformers.RoFormerForMaskedLM(config).save_pretrained(folder)
    return folder


def job(corpus: Path, runs: Path, teacher: Path, *overrides: str) -> JobConfig:
    text = JOB.format(corpus=corpus, runs=runs, teacher=teacher)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:  # each rank's own
        file.write(text)
        file.flush()
        return configs.load(file.name, JobConfig, "job", [*overrides])


def trained(corpus: Path, runs: Path, teacher: Path) -> list[str]:
    """Folders of a run without a stop, of the same run stopped and resumed, and at ZeRO 3."""
    whole = jobs.run(job(corpus, runs, teacher, "name=whole"))
    jobs.finish(whole)
    jobs.run(job(corpus, runs, teacher, "name=resumed"), stop_after=3)
    resumed = jobs.run(configs.load(str(runs / "resumed" / "config.yaml"), JobConfig, "job"))
    cut = jobs.run(job(corpus, runs, teacher, "name=cut", "teacher.zero_stage=3"))
    return [str(folder.path) for folder in (whole, resumed, cut)]


def test_it_teaches_on_text_and_resumes_exactly(corpus, tmp_path, roformer) -> None:
    paths = run_distributed(trained, 2, corpus, tmp_path / "runs", roformer)[0]
    whole, resumed, cut = (RunFolder(Path(path)) for path in paths)
    curve = jobs.curve(whole, "students/small")
    assert {key.rpartition("/")[2] for _, key, _ in curve} >= {"soft_kl", "hidden_mse", "mlm"}
    assert jobs.curve(resumed, "students/small") == curve
    assert jobs.curve(cut, "students/small") == curve
    results = json.loads(whole.evaluation.read_text())["learners"]
    assert results["teacher"]["loss"] > 0
    assert results["students/small"]["agreement"]
    theirs = transformers.RoFormerForMaskedLM.from_pretrained(roformer).state_dict()
    kept = transformers.RoFormerForMaskedLM.from_pretrained(whole.path / "exports" / "teacher")
    assert all(torch.equal(theirs[name], one) for name, one in kept.state_dict().items())


@pytest.mark.slow
def test_a_plan_counts_its_pass(corpus, tmp_path, roformer) -> None:
    found = footprints_and_passes(job(corpus, tmp_path, roformer), "gpu", 32)[0]["teacher"]
    assert found.parameters == 17236
    assert found.forward_flops > 0


ATTENTION = "gives no attention scores, queries, keys or values; compare states or predictions"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "students.small.objective.attention_mse={}",
            f"attention_mse: the teacher's .*{ATTENTION}",
        ),
        (
            "students.small.objective.value_relation={relation_heads: 2}",
            f"students.small.objective.value_relation: the teacher's model {ATTENTION}",
        ),
        (
            "teacher={frozen: false, objective: {mlm: {}}}",
            "teacher.model.kind: transformers is for",
        ),
        ("teacher.dropout=0.1", "teacher.dropout: must be 0: a model of kind transformers"),
        ("students.small.init.teacher_layers=[0]", "model.kind is encoder, and the teacher's"),
        ("teacher.compile=true", "teacher.compile: a model of kind transformers cannot compile"),
        ("teacher.model={kind: transformers, layers: 9}", "teacher.model.config: reads a folder"),
    ],
)
def test_what_it_does_not_give_is_refused(corpus, tmp_path, roformer, override, message) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        job(corpus, tmp_path, roformer, override)
    assert "\n" not in str(refused.value)


@pytest.fixture(name="funnel")
def model_that_shortens_its_sequences(corpus: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "funnel"
    shutil.copytree(corpus / "tokenizer", folder)
    sizes = {"d_model": 24, "n_head": 2, "d_head": 12, "d_inner": 32, "block_sizes": [1, 1]}
    config = transformers.FunnelConfig(vocab_size=600, **sizes)
    transformers.FunnelForMaskedLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("objective", "term"),
    [("{mlm: {}}", "hidden_mse"), ("{hidden_mse: null, attention_mse: {}}", "attention_mse")],
)
def test_layers_that_shorten_sequences_cannot_be_compared(
    corpus, tmp_path, funnel, objective, term
) -> None:
    with pytest.raises(ConfigError) as refused:
        job(corpus, tmp_path, funnel, f"students.small.objective={objective}")
    assert str(refused.value).endswith(
        f"students.small.objective.{term}: the teacher's layers do not each give a state for every "
        "token; compare predictions, or the last states (soft_kl, cosine)"
    )
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_model_that_shortens_its_sequences_teaches_predictions(corpus, tmp_path, funnel) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB.format(corpus=corpus, runs=tmp_path / "runs", teacher=funnel))
    terms = "{mlm: {}, soft_kl: {}, cosine: {}, embedding: {}, hidden_mse: null}"
    wide = "students.small.model.hidden_size=24"
    done = tandem("train", file, "steps=2", wide, f"students.small.objective={terms}")
    assert done.returncode == 0, done.stderr
    line = json.loads((tmp_path / "runs" / "any" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["students/small/soft_kl"] > 0


def two_readings(corpus: Path, runs: Path, teacher: Path) -> list[str]:
    """Folders of runs whose teacher is read by our code, by the library's, and from a store."""
    small = "students.small.objective={mlm: {}, soft_kl: {}, hidden_mse: null}"
    library = [small, "teacher.model={kind: transformers}"]
    ours = jobs.run(job(corpus, runs, teacher, "name=ours", small))
    theirs = jobs.run(job(corpus, runs, teacher, "name=theirs", *library, "teacher.zero_stage=3"))
    return [str(folder.path) for folder in (ours, theirs)]


@pytest.mark.slow
def test_it_teaches_logits_that_the_library_computes(corpus, tmp_path) -> None:
    """A student learns from a MobileBERT, whichever code reads it; also from its stored logits."""
    teacher, runs = tmp_path / "mobilebert", tmp_path / "runs"
    shutil.copytree(corpus / "tokenizer", teacher)
    torch.manual_seed(5)
    sizes = {**SIZES, "embedding_size": 12, "intra_bottleneck_size": 12}
    config = transformers.MobileBertConfig(**sizes)
    transformers.MobileBertForMaskedLM(config).save_pretrained(teacher)
    paths = run_distributed(two_readings, 2, corpus, runs, teacher)[0]
    ours, theirs = (jobs.curve(RunFolder(Path(path)), "students/small") for path in paths)
    assert [at[:2] for at in ours] == [at[:2] for at in theirs]
    values = [[at[2] for at in curve] for curve in (ours, theirs)]
    assert values[0] == pytest.approx(values[1], rel=1e-4)

    file = tmp_path / "job.yaml"
    file.write_text(JOB.format(corpus=corpus, runs=runs, teacher=teacher))
    given = [
        *("name=stored", "teacher.model={kind: transformers}"),
        f"teacher.stored={{path: {tmp_path / 'store'}, top_k: null, precision: fp32}}",
        "students.small.objective={mlm: {}, soft_kl: {}, hidden_mse: null}",
    ]
    for command in ("store", "train"):
        done = tandem(command, file, *given)
        assert done.returncode == 0, done.stderr
    stored = jobs.curve(RunFolder(runs / "stored"), "students/small")
    losses = [[at[2] for at in curve if at[1].endswith("soft_kl")] for curve in (stored, ours)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_student_cannot_be_one(corpus, tmp_path, roformer) -> None:
    """Nor begin as its layers; import says what the folder is for."""
    student = f"students.other={{init: {{pretrained: {roformer}}}, objective: {{mlm: {{}}}}}}"
    with pytest.raises(
        ConfigError, match=r"students\.other\.model.kind: transformers is for a froz"
    ):
        job(corpus, tmp_path, roformer, student)
    with pytest.raises(ModelError, match="can only be a frozen teacher, which needs no import"):
        import_folder(roformer, tmp_path / "out")


def test_a_kind_of_model_says_who_reads_the_folder(corpus, tmp_path) -> None:
    """A family that Tandem knows can be read by the library too."""
    shutil.copytree(corpus / "tokenizer", tmp_path / "bert")
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    bert.save_pretrained(tmp_path / "bert")
    kinds = [
        job(corpus, tmp_path, tmp_path / "bert", *given).teacher.model.kind
        for given in ((), ["teacher.model={kind: transformers}"])
    ]
    assert kinds == ["encoder", "transformers"]


@pytest.fixture(name="classifier")
def fine_tuned(corpus: Path, tmp_path: Path) -> Path:
    """Its labels are in the other order, and the examples are beside it."""
    folder = tmp_path / "classifier"
    shutil.copytree(corpus / "tokenizer", folder)
    torch.manual_seed(5)
    config = transformers.RoFormerConfig(
        **SIZES, embedding_size=12, id2label=dict(enumerate(LABELS[::-1]))
    )
    transformers.RoFormerForSequenceClassification(config).save_pretrained(folder)
    write(tmp_path / "train.tsv", lines(40, 0))
    return folder


def test_it_teaches_a_task(classifier, tmp_path) -> None:
    student = tmp_path / "student.yaml"
    student.write_text("layers: 1\nhidden_size: 16\nheads: 2\nffn_size: 32\nvocab_size: 600\n")
    given = [
        *(f"teacher.init.pretrained={classifier}", f"data.train={tmp_path / 'train.tsv'}"),
        *("data.sequence_length=16", "epochs=2", "log.wandb=disabled"),
        f"output_dir={tmp_path}/runs",
        *(f"students.small.model={student}", "students.small.init=null"),
    ]
    done = tandem("train", "distil_single_sentence", *given, "--nproc", 2)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "distil_single_sentence"
    results = json.loads((run / "evaluation.json").read_text())["learners"]
    assert 0 <= results["teacher"]["single_sentence_accuracy"] <= 1
    made = with_examples(configs.load("distil_single_sentence", JobConfig, "task", given))
    config = made.teacher.architecture
    assert config.task_heads["single_sentence"].labels == LABELS
    ours = build(config, seed=1).eval()
    ours.load_state_dict(from_folder("teacher", made.teacher.init, config))
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    ids = torch.arange(5, 17).view(2, 6)
    with torch.no_grad():
        wanted, got = theirs(ids).logits, ours(ids).heads["single_sentence"]
    torch.testing.assert_close(got, wanted[:, [1, 0]], rtol=0, atol=1e-5)


def test_it_predicts_and_embeds_and_is_evaluated_as_it_is(classifier, tmp_path) -> None:
    examples = tmp_path / "train.tsv"
    told = tandem("predict", classifier, examples)
    assert told.returncode == 0, told.stderr
    predicted = [json.loads(line) for line in told.stdout.splitlines()]
    assert set(predicted[0]["probabilities"]) == set(LABELS)
    answers = [line.split("\t")[1] for line in examples.read_text().splitlines()[1:]]
    right = [row["label"] == answer for row, answer in zip(predicted, answers, strict=True)]
    scored = tandem("evaluate", classifier, f"data.validation={examples}", "--json")
    assert scored.returncode == 0, scored.stderr
    (accuracy,) = json.loads(scored.stdout)["scores"].values()
    assert accuracy == pytest.approx(sum(right) / len(right))
    vectors = tandem("embed", classifier, "the end was", "--json")
    assert vectors.returncode == 0, vectors.stderr
    assert len(json.loads(vectors.stdout)["vectors"][0]["vector"]) == 24
