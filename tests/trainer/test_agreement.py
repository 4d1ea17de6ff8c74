"""Agreement of two models on held-out text, against plain torch on full logits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import configs
from data_pipeline import BatchStream, DataConfig, MaskingConfig, open_corpora
from model import EncoderConfig, build, save_pretrained
from tests.distributed import run_distributed
from tests.trainer import jobs
from tests.trainer.test_token_tasks import conll, dream, squad
from trainer.batch_config import BatchConfig
from trainer.config import EvaluationConfig, JobConfig
from trainer.evaluation.final_scores import agreement
from trainer.evaluation.held_out import ValidationSet
from trainer.job_data.examples import with_examples
from trainer.learner_config import LearnerConfig
from trainer.objectives import ObjectiveConfig
from trainer.tasks.pretraining import MaskedLanguageModelling

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def validation(corpus) -> ValidationSet:
    data = DataConfig(path=str(corpus), sequence_length=32)
    evaluation = EvaluationConfig(sequences=16)
    teacher = LearnerConfig(objective=ObjectiveConfig(mlm=MaskedLanguageModelling()))
    batch = BatchConfig(micro_batch=8, micro_tokens=4 * 32)
    job = JobConfig("job", data, teacher, 1, evaluation=evaluation, batch=batch)
    return ValidationSet(job, open_corpora(data))


def small(seed: int, **sizes: int):
    config = EncoderConfig(
        vocab_size=600, hidden_size=32, layers=2, heads=2, ffn_size=64, max_positions=32
    )
    return build(dataclasses.replace(config, **sizes), seed).eval()


@torch.no_grad()
def test_agreement_is_that_of_the_whole_logits(validation):
    student, teacher = small(1, hidden_size=16), small(2)
    found = agreement(student, teacher, validation, CPU)
    ours, theirs = [], []
    for batch in next(iter(validation.corpora.values())).batches():
        chosen = torch.from_numpy(batch.labels()) >= 0
        inputs = [
            torch.from_numpy(array).long()
            for array in (batch.input_ids, batch.segment_ids, batch.attention_mask)
        ]
        ours.append(student(*inputs).logits[chosen])
        theirs.append(teacher(*inputs).logits[chosen])
    s, t = torch.cat(ours), torch.cat(theirs)
    assert found.top_1 == (s.argmax(-1) == t.argmax(-1)).double().mean().item()
    expected = (t.softmax(-1) * (t.log_softmax(-1) - s.log_softmax(-1))).sum(-1).mean()
    assert found.kl == pytest.approx(expected.item(), rel=1e-4)


def test_a_model_agrees_with_itself(validation):
    teacher = small(2)
    found = agreement(teacher, teacher, validation, CPU)
    assert found.top_1 == 1.0
    assert found.kl == pytest.approx(0.0, abs=1e-6)


def test_vocabularies_of_two_sizes_are_not_compared(validation):
    assert agreement(small(1, vocab_size=608), small(2), validation, CPU) is None


def test_no_more_tokens_are_scored_at_once_than_are_trained_on(validation):
    rows = []

    def score(batch):
        rows.append(len(batch.input_ids))
        return ()

    validation.evaluate(score, (), CPU)
    assert set(rows) == {4}


def test_held_out_sequences_have_one_masking_rate(corpus):
    """The one that is given, or at which the job's training ends."""
    teacher = LearnerConfig(objective=ObjectiveConfig(mlm=MaskedLanguageModelling()))

    def labels(**masking: float):
        data = DataConfig(path=str(corpus), masking=MaskingConfig(**masking))
        job = JobConfig("job", data, teacher, 1, evaluation=EvaluationConfig(sequences=16))
        (held_out,) = ValidationSet(job, open_corpora(data)).corpora.values()
        return np.concatenate([batch.labels() for batch in held_out.batches()])

    falling = labels(rate=0.3, final_rate=0.15, final_rate_step=9)
    np.testing.assert_array_equal(falling, labels(rate=0.15))
    np.testing.assert_array_equal(falling, labels(rate=0.3, held_out_rate=0.15))
    assert not np.array_equal(falling, labels(rate=0.3))


@pytest.mark.parametrize("wanted", [1, 64, 70, 10**6])
def test_as_many_sequences_are_scored_as_are_asked_for_or_there(corpus, wanted):
    data = DataConfig(path=str(corpus), sequence_length=16)
    teacher = LearnerConfig(objective=ObjectiveConfig(mlm=MaskedLanguageModelling()))
    evaluation = EvaluationConfig(sequences=wanted)
    job = JobConfig("job", data, teacher, 1, evaluation=evaluation)
    corpora = open_corpora(data)
    there = BatchStream(next(iter(corpora.values())).split("val"), data, 0, 1).samples_per_epoch
    assert there > 70
    (held_out,) = ValidationSet(job, corpora).corpora.values()
    ids = [one for batch in held_out.batches() for one in batch.sample_ids]
    assert len(ids) == len(set(ids)) == min(wanted, there)


JOB = """
name: {name}
steps: 1
output_dir: {folder}/runs
data: {{root: {folder}, sequence_length: 32, tokenizer: {folder}/large, {data}}}
batch: {{size: 4, micro_batch: 4}}
teacher: {{init: {{pretrained: {folder}/large, random: {teacher}}}, objective: {{{task}: {{}}}}}}
students:
  small: {{init: {{pretrained: {folder}/little, random: {student}}}, objective: {{{task}: {{}}}}}}
log: {{wandb: disabled}}
"""
RANKED = "train: judged.tsv, files: {queries: texts.jsonl, documents: texts.jsonl"
DATA = {
    "single_sentence": "train: texts.tsv",
    "sentence_pair": "train: pairs.tsv",
    "tagging": "train: words.txt",
    "span": "train: questions.json, validation: questions.json",
    "multiple_choice": "train: dialogues.json",
    "retrieval": RANKED + "}",
    "reranking": RANKED + ", candidates: run.txt}",
}


@pytest.fixture(scope="module")
def tasks(corpus, tmp_path_factory) -> Path:
    """Examples of each task, and two pre-trained models, which have a masked-LM head."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, model in {"large": small(2), "little": small(1, hidden_size=16)}.items():
        save_pretrained(model, folder / name, corpus / "tokenizer")
    rows = [("the class", "a list", "ab"[number % 2]) for number in range(20)]
    table = [("text_a", "text_b", "label"), *rows]
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\t{label}\n" for a, b, label in table))
    (folder / "texts.tsv").write_text("".join(f"{b}\t{c}\n" for _, b, c in table).replace("_b", ""))
    (folder / "words.txt").write_text(conll(20, 0))
    (folder / "questions.json").write_text(squad(20, 0))
    (folder / "dialogues.json").write_text(dream(20, 0))
    texts = [{"_id": str(number), "text": "the list"} for number in range(20)]
    (folder / "texts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in texts))
    judged = [f"{number}\t{(number * 7 + k) % 20}\t{k}\n" for number in range(20) for k in (0, 1)]
    (folder / "judged.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    found = [f"{n} Q0 {(n + k) % 20} 1 {9 - k} x\n" for n in range(20) for k in range(8)]
    (folder / "run.txt").write_text("".join(found))
    return folder


def agreements(folder: Path, task: str) -> list[object]:
    """What the finished runs of a task say, for all first weights of teacher and student."""
    found = []
    for student, teacher in ((s, t) for s in (False, True) for t in (False, True)):
        words = {"task": task, "student": student, "teacher": teacher, "data": DATA[task]}
        text = JOB.format(name=f"{task}-{student}-{teacher}".lower(), folder=folder, **words)
        run = jobs.run(with_examples(configs.load_text(text, JobConfig, "job", (), "job.yaml")))
        jobs.finish(run)
        results = json.loads(run.evaluation.read_text())["learners"]
        found.append(results["students/small"]["agreement"])
    return found


QUICK = ("single_sentence",)


@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=() if t in QUICK else pytest.mark.slow) for t in DATA]
)
def test_labelled_examples_have_no_tokens_to_agree_about(tasks, task) -> None:
    assert run_distributed(agreements, 1, tasks, task) == [[None] * 4]
