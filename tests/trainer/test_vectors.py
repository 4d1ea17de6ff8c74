"""Vectors learnt from a teacher's: losses, whole jobs, and exports in sentence-transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertModel

import configs
import tandem as api
from configs import ConfigError
from data_pipeline import Batch, Target
from model import EncoderConfig, ModelError, build, from_pretrained, save_pretrained
from tests.conftest import tandem
from tests.distributed import run_distributed
from tests.trainer import tiny
from tests.trainer.test_exactness import record_first_gradients
from trainer.batch_config import StepShape
from trainer.batches import to_device
from trainer.config import JobConfig
from trainer.learner_config import LearnerConfig
from trainer.learner_life import InitConfig
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.objectives import ObjectiveConfig
from trainer.objectives.task import Part
from trainer.run_folder import metrics
from trainer.step import train_step
from trainer.tasks.vectors import SimilaritiesTerm, VectorMSE, Vectors, VectorSimilarities

ROWS, UNREADABLE, TEMPERATURE = 8, 5, 0.2
STUDENT = student_key("small")
TRANSFORMERS = "teacher.model.kind=transformers"
TERMS = ("vectors", "vector_mse", "vector_similarities")
SIZES = {
    "vocab_size": 600, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 48, "initializer_range": 0.3,
}  # fmt: skip


def texts() -> Batch:
    rng = np.random.default_rng(3)
    mask = (np.arange(10) < rng.integers(4, 11, ROWS)[:, None]).astype(np.int64)
    is_lost = np.arange(ROWS) == UNREADABLE
    return Batch(
        input_ids=rng.integers(5, tiny.VOCABULARY, mask.shape) * mask,
        segment_ids=np.zeros_like(mask),
        attention_mask=mask,
        targets={"vectors": Target(np.arange(ROWS)).without(is_lost)},
        sample_ids=np.arange(ROWS),
        epochs=np.zeros(ROWS, np.int64),
        is_trimmed=True,
    )


def learners(loss: str, micro_batch: int, passes: int, stage: int) -> tuple[Learner, Learner]:
    """A frozen teacher of width 32, and a student of width 16."""
    task, shape = Vectors(), StepShape(tiny.STEPS, 1, micro_batch, passes)
    similarities = {"loss": loss} | ({"temperature": TEMPERATURE} if loss == "kl" else {})
    objective = ObjectiveConfig(
        vectors=task,
        vector_mse=VectorMSE(0.5, tasks=["vectors"]),
        vector_similarities=VectorSimilarities(2.0, tasks=["vectors"], **similarities),
    )
    frozen = LearnerConfig(
        model=task.equip(tiny.encoder(layers=2)).without_mlm_head(),
        init=InitConfig(pretrained="-"),
        frozen=True,
    )
    config = LearnerConfig(
        model=tiny.encoder(layers=1, hidden_size=16),
        objective=objective,
        zero_stage=stage,
        gradient_clipping=0.0,
    )
    return tuple(
        Learner(name, of, frozen.model, shape)
        for name, of in ((TEACHER, frozen), (STUDENT, config))
    )


def trained(cuts: list[tuple[str, int, int, int]]):
    """The terms and the gradients of one step, for each way to cut it."""
    results = []
    for cut in cuts:
        teacher, student = learners(*cut)
        gradients = record_first_gradients(student)
        result = train_step(teacher, [student], tiny.my_rows(texts()), 0)
        results.append((result.terms[STUDENT], result.losses[STUDENT], gradients))
    return results


def expected(loss: str):
    """The same by plain torch, a pair of texts at a time."""
    batch, (teacher, student) = texts(), learners(loss, ROWS, 1, 0)
    ids, mask = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.attention_mask)

    def vectors(learner: Learner) -> torch.Tensor:
        states = learner.model(ids, torch.zeros_like(ids), mask, output_hidden_states=True)
        mean = (states.hidden_states[-1] * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(mean, dim=-1)

    ours, theirs = vectors(student), vectors(teacher).detach()
    by_name = student.engine.module.objective.by_name
    cosine, mse = (by_name[name].projection(ours) for name in ("vectors", "vector_mse"))
    rows = [row for row in range(ROWS) if row != UNREADABLE]
    apart = []
    for row in rows:
        others = [other for other in rows if other != row]
        s, t = ours[others] @ ours[row], theirs[others] @ theirs[row]
        if loss == "mse":
            apart.append(F.mse_loss(s, t))
        else:
            logs = (s / TEMPERATURE).log_softmax(0), (t / TEMPERATURE).softmax(0)
            apart.append(F.kl_div(*logs, reduction="sum"))
    terms = {
        "vectors": (1 - F.cosine_similarity(cosine, theirs))[rows].mean(),
        "vector_mse": (mse - theirs).square().sum(1)[rows].mean(),
        "vector_similarities": torch.stack(apart).mean(),
    }
    total = terms["vectors"] + 0.5 * terms["vector_mse"] + 2.0 * terms["vector_similarities"]
    total.backward()
    named = student.engine.module.named_parameters()
    gradients = {name: p.grad for name, p in named if p.grad is not None}
    return {name: term.item() for name, term in terms.items()}, total.item(), gradients


@pytest.mark.parametrize("loss", ["kl", pytest.param("mse", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("ranks", "cuts"),
    [
        pytest.param(1, [(8, 1, 0), (3, 3, 0)], marks=pytest.mark.slow),
        (2, [(4, 1, 0), (3, 2, 0), (2, 2, 3)]),
    ],
)
def test_losses_and_gradients_are_those_of_the_whole_batch(loss, ranks, cuts) -> None:
    ((terms, total, gradients),) = run_distributed(expected, 1, loss)
    for told, value, ours in run_distributed(trained, ranks, [(loss, *cut) for cut in cuts])[0]:
        assert value == pytest.approx(total, rel=1e-5)
        for name in TERMS:
            assert told[name] == pytest.approx(terms[name], rel=1e-5), name
        for name, gradient in gradients.items():
            if not name.endswith("key.bias"):  # whose true gradient is zero
                assert (ours[name] - gradient).norm() / gradient.norm() < 2e-5, name


def similarities() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Losses and gradients of float32 products, and of a pass that multiplies in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (F.normalize(torch.randn(5, 16, generator=generator)) for _ in range(2))
    batch = to_device(texts().rows(0, 5), torch.device("cpu"))
    term, results = SimilaritiesTerm(VectorSimilarities(tasks=["vectors"])), []
    for narrow in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            (examples,) = term.over_batch([ours], [batch], [theirs])
        results.append((examples.losses, examples.gradients))
    return results


def test_similarities_do_not_depend_on_the_precision_of_the_pass() -> None:
    ((wide, narrow),) = run_distributed(similarities, 1)
    assert all(map(torch.equal, wide, narrow))


# Whole jobs


def sentences_of(corpus: Path) -> list[str]:
    words = [
        word
        for word in json.loads((corpus / "tokenizer" / "tokenizer.json").read_text())["model"][
            "vocab"
        ]
        if word.isalpha() and len(word) > 2
    ]
    rng = np.random.default_rng(5)
    return [" ".join(rng.choice(words, rng.integers(3, 9))) for _ in range(120)]


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain texts, a folder of sentence-transformers, and a student's first weights."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    folder = tmp_path_factory.mktemp("vectors")
    lines = sentences_of(corpus)
    (folder / "texts.txt").write_text("\n".join([*lines[:60], "", *lines[60:]]) + "\n")
    torch.manual_seed(3)
    for kind in (BertModel, BertForMaskedLM):
        raw = folder / kind.__name__
        kind(BertConfig(**SIZES)).save_pretrained(raw)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (source := corpus / "tokenizer" / name).exists():
                (raw / name).write_bytes(source.read_bytes())
    made = SentenceTransformer(str(folder / "BertModel"), device="cpu")
    SentenceTransformer(modules=[made[0], Pooling(24, pooling_mode="cls")]).save(
        str(folder / "pooled")
    )
    small = EncoderConfig(
        vocab_size=600, hidden_size=16, layers=1, heads=2, ffn_size=32, max_positions=48
    )
    save_pretrained(build(small, seed=1), folder / "small", corpus / "tokenizer")
    return folder


def words(folder: Path, teacher: str, *more: str) -> list[str]:
    return [
        *("train", "distil_vectors", f"teacher.init.pretrained={folder / teacher}"),
        f"data.train={folder / 'texts.txt'}",
        f"students.small.init={{pretrained: {folder / 'small'}, layers: null}}",
        *("batch={size: 16, micro_batch: 4}", "data.validation_fraction=0.25"),
        *("data.sequence_length=24", "log={every: 1, wandb: disabled}"),
        *more,
    ]


def by_library(folder: Path, lines: list[str], pooling: str) -> np.ndarray:
    """Cosines of every pair by the states of `transformers`."""
    model = BertModel.from_pretrained(folder).eval()
    read = AutoTokenizer.from_pretrained(folder)(lines, return_tensors="pt", padding=True)
    with torch.no_grad():
        states = model(**read).last_hidden_state
    mask = read["attention_mask"][..., None]
    pooled = states[:, 0] if pooling == "cls" else (states * mask).sum(1) / mask.sum(1)
    vectors = F.normalize(pooled.double(), dim=1)
    return (vectors @ vectors.t()).numpy()[np.triu_indices(len(lines), k=1)]


@pytest.mark.parametrize(
    ("teacher", "pooling", "more"),
    [
        ("pooled", "cls", []),
        pytest.param("pooled", "cls", [TRANSFORMERS], marks=pytest.mark.slow),
        pytest.param("BertForMaskedLM", "mean", [TRANSFORMERS], marks=pytest.mark.slow),
    ],
)
def test_a_student_learns_the_vectors_of_any_folder(
    folder, corpus, tmp_path, teacher, pooling, more
) -> None:
    """Its held-out score is that of the cosines of `transformers` and sentence-transformers."""
    import scipy.stats
    from sentence_transformers import SentenceTransformer

    rate = ["students.small.optimizer.learning_rate=3e-3", f"output_dir={tmp_path}", "epochs=8"]
    done = tandem(*words(folder, teacher, *rate, *more))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "distil_vectors"
    rows = [row for row in metrics.read(run / "metrics.jsonl") if f"{STUDENT}/vectors" in row]
    for term in TERMS[::2]:
        assert rows[-1][f"{STUDENT}/{term}"] < 0.8 * rows[0][f"{STUDENT}/{term}"]
    facts = json.loads((run / "evaluation.json").read_text())["learners"]
    assert facts[TEACHER]["vectors_spearman"] == pytest.approx(1.0)
    lines = [line for line in (folder / "texts.txt").read_text().splitlines() if line]
    lines = [line for number, line in enumerate(lines) if Part(True, 0.25).has(number)]
    encoder = SentenceTransformer(str(run / "exports" / "small"), device="cpu")
    ours = encoder.encode(lines)
    cosines = (ours @ ours.T)[np.triu_indices(len(lines), k=1)]
    theirs = by_library(folder / teacher, lines, pooling)
    right = scipy.stats.spearmanr(cosines, theirs).statistic
    assert facts[STUDENT]["vectors_spearman"] == pytest.approx(right, abs=2e-3)
    embedded = api.embed(run / "exports" / "small", lines)
    np.testing.assert_allclose(ours, embedded, rtol=0, atol=1e-6)
    said = tandem("embed", run / "exports" / "small", *lines[:2], "--json")
    vectors = [row["vector"] for row in json.loads(said.stdout)["vectors"]]
    np.testing.assert_allclose(ours[:2], vectors, rtol=0, atol=1e-6)


def test_sentences_a_prefix_and_a_table(folder, tmp_path) -> None:
    """Terms beside the task, two ranks, and an export with the prefix as its prompt."""
    from sentence_transformers import SentenceTransformer

    lines = [f"{line}. And {line}!" for line in (folder / "texts.txt").read_text().split("\n")[:40]]
    rows = [json.dumps({"body": line}) for line in [*lines, "\u200b"]]
    (table := tmp_path / "texts.jsonl").write_text("\n".join(rows))
    objective = "{vectors: {unit: sentence, prefix: 'find '}, vector_mse: {}}"
    given = [
        *(f"data.train={table}", "data.columns.text=body", f"output_dir={tmp_path}", "steps=2"),
        *("epochs=null", f"students.small.objective={objective}", "checkpoint.every=1"),
    ]
    done = tandem(*words(folder, "pooled", *given), "--nproc", 2)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "distil_vectors"
    exported = run / "exports" / "small"
    encoder = SentenceTransformer(str(exported), device="cpu")
    assert encoder.prompts == {"query": "find ", "document": "find "}
    theirs = encoder.encode(lines[:2])
    ours = api.embed(exported, [f"find {line}" for line in lines[:2]])
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-6)
    (plain := tmp_path / "two.txt").write_text("\n".join(lines[:2]))
    said = tandem("predict", exported, plain)
    vectors = [json.loads(line)["vector"] for line in said.stdout.splitlines()]
    np.testing.assert_allclose(vectors, ours, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        ("Dense", {}, "modules.json: its vectors go through Dense, which is not read here"),
        ("Pooling", {"pooling_mode": "max"}, "config.json: pools by max; cls and mean are read"),
        (
            "Pooling",
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "config.json: pools by cls+mean",
        ),
    ],
)
def test_modules_that_are_not_read(folder, tmp_path, module, settings, message) -> None:
    for path in (folder / "BertModel").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    modules = [{"path": "1", "type": f"sentence_transformers.models.{module}"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text(json.dumps(settings))
    for kind in ("", "transformers"):
        with pytest.raises(ModelError, match=re.escape(message)):
            from_pretrained(tmp_path, kind)


def test_what_would_change_a_text_before_its_vector_is_told(folder, tmp_path, caplog) -> None:
    """`sentence-transformers` puts a prompt before it, or makes its letters small."""
    save_pretrained(from_pretrained(folder / "small"), tmp_path)
    (tmp_path / "pooling").mkdir()
    (tmp_path / "pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": false}')
    from_pretrained(tmp_path)
    assert not caplog.messages
    prompts["default_prompt_name"] = "query"
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    from_pretrained(tmp_path)
    assert "default_prompt_name: its prompt is not put before texts" in caplog.text
    assert "do_lower_case: texts are read as they are" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["students.small.objective.vectors.teacher=mean"], "only terms that compare predictions"),
        (
            ["students.small.objective.vector_similarities={loss: mse, temperature: 1.0}"],
            "vector_similarities.temperature: has no part in mse; remove it",
        ),
        (
            [
                "students.small.objective={vectors: null, vector_similarities: null, "
                "single_sentence: {}, vector_mse: {}}"
            ],
            "vector_mse: is about vectors, and single_sentence has none; put vectors or retrieval",
        ),
    ],
)
def test_what_does_not_fit_is_refused(folder, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        configs.load("distil_vectors", JobConfig, "task", words(folder, "pooled", *changes)[2:])


@pytest.mark.slow
def test_mteb_runs_on_an_export(folder, tmp_path) -> None:
    """A task of its own on local pairs gives the correlation of the export's cosines."""
    import scipy.stats
    from sentence_transformers import SentenceTransformer

    mteb = pytest.importorskip("mteb")
    datasets = pytest.importorskip("datasets")
    done = tandem(*words(folder, "pooled", f"output_dir={tmp_path}", "steps=2", "epochs=null"))
    assert done.returncode == 0, done.stderr
    exported = tmp_path / "distil_vectors" / "exports" / "small"
    lines = [line for line in (folder / "texts.txt").read_text().splitlines() if line][:40]
    rows = {"sentence1": lines[::2], "sentence2": lines[1::2], "score": [n % 6 for n in range(20)]}

    class Pairs(mteb.abstasks.AbsTaskSTS):
        metadata = mteb.TaskMetadata(
            name="LocalPairs",
            description="Pairs of words.",
            type="STS",
            eval_langs=["eng-Latn"],
            main_score="cosine_spearman",
            dataset={"path": "local", "revision": "1"},
        )

        def load_data(self, *_: Any, **__: Any) -> None:
            self.dataset = {"test": datasets.Dataset.from_dict(rows)}
            self.data_loaded = True

    encoder = SentenceTransformer(str(exported), device="cpu")
    result = mteb.evaluate(encoder, tasks=[Pairs()], cache=None)
    first, second = (api.embed(exported, rows[key]) for key in ("sentence1", "sentence2"))
    cosines = F.cosine_similarity(torch.tensor(first), torch.tensor(second))
    right = scipy.stats.spearmanr(cosines, rows["score"])
    assert result.task_results[0].get_score() == pytest.approx(right.statistic, abs=1e-3)
