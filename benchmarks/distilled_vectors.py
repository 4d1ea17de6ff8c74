"""What a small encoder's vectors are worth after learning a larger one's, on STS-B and Cranfield.

    python benchmarks/distilled_vectors.py TEACHER STUDENT DATA OUT [--seeds 1,2,3]

TEACHER and STUDENT are exports of one vocabulary, DATA a folder with GLUE's STS-B and Cranfield.
The teacher is fine-tuned on the first 1,000 pairs of STS-B (`stsb_bi_encoder`, one epoch). The
student learns its vectors on the sentences of the first 1,500 pairs, without their labels
(`distil_vectors`). All are scored by the cosines of mean vectors: Spearman's correlation on 500 of
STS-B's validation pairs, and nDCG@10 of Cranfield's queries among all documents, of which the
first 20 words are read.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import scipy.stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tandem
from data_pipeline.task_files.collection import Collection
from data_pipeline.task_files.tables import read_table
from trainer.scoring.task_scores import ranking_scores

LABELLED, PAIRS, SCORED, WORDS = 1000, 1500, 500, 20
FIELDS = {"text_a": "sentence1", "text_b": "sentence2", "label": "score"}


def main() -> None:
    """Train what has not been trained, and print the table."""
    arguments = _arguments()
    data, out = arguments.data, arguments.out
    out.mkdir(parents=True, exist_ok=True)
    pairs = _pairs(data / "glue/STS-B/train.tsv.xz")[:PAIRS]
    texts = out / "texts.txt"
    texts.write_text("\n".join(dict.fromkeys(text for a, b, _ in pairs for text in (a, b))))
    teacher = _teacher(arguments.teacher, data, out)
    students = [_student(seed, teacher, arguments.student, texts, out) for seed in arguments.seeds]
    print("| encoder | STS-B, Spearman | Cranfield, nDCG@10 |")
    print("|---|---|---|")
    for name, folders in {
        "teacher, pre-trained": [arguments.teacher],
        "teacher, fine-tuned": [teacher],
        "student, pre-trained": [arguments.student],
        "student, distilled": students,
    }.items():
        scores = [(_similarity(folder, data), _retrieval(folder, data)) for folder in folders]
        print(f"| {name} | {' | '.join(map(_range, zip(*scores, strict=True)))} |", flush=True)


def _teacher(model: Path, data: Path, out: Path) -> Path:
    """The export of the fine-tuned teacher."""
    words = [
        f"data.train={data}/glue/STS-B/train.tsv.xz",
        f"data.max_trained={LABELLED}",
        "epochs=1",
    ]
    words += [f"data.validation={data}/glue/STS-B/dev.tsv.xz", f"data.max_scored={SCORED}"]
    words += ["teacher.optimizer.learning_rate=3e-4", "evaluation.every=100000"]
    words = ["finetune", "stsb_bi_encoder", "--model", str(model), "name=teacher", *words]
    return _run(out, "teacher", "teacher", words)


def _student(seed: int, teacher: Path, model: Path, texts: Path, out: Path) -> Path:
    """The export of a distilled student."""
    words = [f"teacher.init.pretrained={teacher}", f"data.train={texts}", f"seed={seed}"]
    words += [f"students.small.init={{pretrained: {model}, layers: null}}"]
    words += ["students.small.optimizer.learning_rate=1e-3", "evaluation.every=100000"]
    name = f"student-{seed}"
    return _run(out, name, "small", ["train", "distil_vectors", f"name={name}", *words])


def _run(out: Path, name: str, learner: str, words: Sequence[str]) -> Path:
    export = out / name / "exports" / learner
    if not export.exists():
        more = [f"output_dir={out}", "log.wandb=disabled"]
        command = [sys.executable, "-m", "tandem", *words, *more]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return export


def _pairs(file: Path) -> list[tuple[str, str, float]]:
    """(text, text, similarity) of each row of STS-B."""
    rows = [row.values for row in read_table(str(file), FIELDS)]
    return [(row["text_a"], row["text_b"], float(row["label"])) for row in rows]


def _vectors(folder: Path, texts: Sequence[str]) -> np.ndarray:
    """Vectors of length 1, [texts, size]."""
    vectors = tandem.embed(folder, texts)
    scaled: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled


def _similarity(folder: Path, data: Path) -> float:
    first, second, labels = zip(*_pairs(data / "glue/STS-B/dev.tsv.xz")[:SCORED], strict=True)
    cosines = (_vectors(folder, first) * _vectors(folder, second)).sum(axis=1)
    return float(scipy.stats.spearmanr(cosines, labels).statistic)


def _retrieval(folder: Path, data: Path) -> float:
    files = data / "retrieval/cranfield"
    collection = Collection.read(
        str(files / "cran.all.1400.xml.xz"), str(files / "cran.qry.xml"), numbered_by_order=True
    )
    relevance = collection.relevance(str(files / "cranqrel.trec.txt"))
    read = list(collection.readable)
    documents = _vectors(
        folder, [" ".join(collection.documents[n].text.split()[:WORDS]) for n in read]
    )
    queries = _vectors(folder, [collection.queries[query].text for query in relevance])
    ranked = {
        str(query): {str(n): float(s) for n, s in zip(read, documents @ vector, strict=True)}
        for query, vector in zip(relevance, queries, strict=True)
    }
    return ranking_scores(ranked, _named(relevance), ["ndcg_10"])["ndcg_10"]


def _named(relevance: Mapping[int, Mapping[int, int]]) -> dict[str, dict[str, int]]:
    return {
        str(query): {str(document): value for document, value in judged.items()}
        for query, judged in relevance.items()
    }


def _range(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("teacher", "student", "data", "out"):
        parser.add_argument(name, type=lambda path: Path(path).resolve())
    parser.add_argument(
        "--seeds", type=lambda text: [*map(int, text.split(","))], default=[1, 2, 3]
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
