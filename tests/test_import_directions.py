"""Imports point one way: a room imports only rooms before it in its list, or itself.

A room is a folder or a file. Imports inside functions and for type checkers count too.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each folder's rooms, the lowest first. A package's `__init__` hands names on, and stands on top.
ROOMS = {
    ".": "configs data_pipeline model cluster trainer commands tandem",
    "configs": (
        "errors durable yaml_text kinds typed strict_json rules section "
        "reference interpolation loading devices studies suites plan_facts runs "
        "progress tables"
    ),
    "data_pipeline": (
        "errors hashing remote text task_files shards tokenization packing masking config "
        "order reading building examples augmentation"
    ),
    "data_pipeline/text": ("text_files formats records documents sentences system_prose"),
    "data_pipeline/task_files": (
        "contents tables conll questions parallel retrieval collection prose_tasks"
    ),
    "data_pipeline/shards": ("blocks manifest index sources ranges writing locking"),
    "data_pipeline/tokenization": (
        "sentencepiece_models vocabularies "
        "tokenizer comparison pruning training word_encoding alignment"
    ),
    "data_pipeline/packing": "sequences kinds",
    "data_pipeline/packing/kinds": " ".join(
        sorted(path.stem for path in (ROOT / "data_pipeline/packing/kinds").glob("[!_]*.py"))
    ),
    "data_pipeline/masking": "config words masker torch_masker",
    "data_pipeline/reading": "corpus batches other_tokens lanes stream staging dumping",
    "data_pipeline/examples": ("example storing reading stream dumping"),
    "data_pipeline/augmentation": "replacement word_vectors perturbation",
    "data_pipeline/building": (
        "near_duplicates encoding journal finishing build merging checking reporting"
    ),
    "model": (
        "errors precision documents attention_kernel task_head_config head_modules "
        "model_config config parts heads generation protocol "
        "initialisation accounting encoder "
        "masked_language_model attention_heads layer_selection "
        "model_card hugging_face kinds onnx_export"
    ),
    "model/hugging_face": (
        "task_heads library family bert albert distilbert mobilebert modernbert "
        "eurobert neobert nomic_bert electra deberta weights files conversion folder"
    ),
    "trainer": (
        "errors device learner_names measure tracking "
        "checkpoint optimizers watch batches denominators fusion vocabulary_projection "
        "teacher_outputs replaced_tokens "
        "scoring stored_logits objectives tasks schedules learner_life "
        "learner_config batch_config task_facts job_tree "
        "roles config "
        "run_folder control job_data report learners step "
        "footprint evaluation record lifecycle job run rehearsal storing prediction "
        "augmentation suites analysis"
    ),
    "trainer/checkpoint": (
        "folder layout attempts snapshot manifest reader carried publication writer"
    ),
    "trainer/objectives": (
        "stages term layers row_losses vocabulary task labels terms "
        "objective_config shared_spans objective"
    ),
    "trainer/objectives/terms": "states attention predictions divergences own_predictions",
    "trainer/learners": ("state zero module engine learner first_weights learners"),
    # A new kind of model, or task, is one file, and nothing else names it: not these lists either.
    "model/kinds": " ".join(sorted(path.stem for path in (ROOT / "model/kinds").glob("[!_]*.py"))),
    "model/head_modules": " ".join(
        sorted(path.stem for path in (ROOT / "model/head_modules").glob("[!_]*.py"))
    ),
    "trainer/tasks": " ".join(
        sorted(path.stem for path in (ROOT / "trainer/tasks").glob("[!_]*.py"))
    ),
    "trainer/optimizers": ("config shards moments gated kinds"),
    "trainer/optimizers/kinds": " ".join(
        sorted(path.stem for path in (ROOT / "trainer/optimizers/kinds").glob("[!_]*.py"))
    ),
    "trainer/watch": "guard ranks",
    "trainer/tracking": "trackers wandb_tracker kinds",
    "trainer/tracking/kinds": " ".join(
        sorted(path.stem for path in (ROOT / "trainer/tracking/kinds").glob("[!_]*.py"))
    ),
    "trainer/run_folder": "folder metrics run_files",
    "trainer/job_data": ("task_heads encoding examples other_tokenizers fit counting feed"),
    "trainer/report": "elements chart curves results savings table page",
    "trainer/scoring": "columns metric scores task_scores task_metrics span_metric ranking_metric",
    "trainer/footprint": ("work fake_tensors fake_step footprint demands"),
    "trainer/evaluation": (
        "text_vectors minimal_pairs held_out setbacks "
        "evaluations finished mistakes breakdown labelled_files "
        "final_scores export"
    ),
    "trainer/prediction": ("fine_tuned texts embedding parts_of_texts predicting rankings"),
    "trainer/augmentation": "augmenting replacing",
    "trainer/analysis": "maps linguistic examples analysis page",
    "trainer/record": "gauges display recorder",
    "trainer/stored_logits": "format reading",
    "trainer/lifecycle": "continuity start in_progress forking",
    "cluster": (
        "errors ranks run_files config scheduler script slurm "
        "local preflight run_state status planning commands"
    ),
    "cluster/planning": "machine failures memory plan text",
    "commands": (
        "ending errors options job_texts starting job_configs api data tokenizers "
        "models prediction embedding training finetuning suite_runs suites results runs "
        "analysis reference listing"
    ),
}

# What each top-level folder may know of the others, besides which the list above counts.
KNOWN = {
    "configs": [],
    "data_pipeline": ["configs"],
    "model": ["configs"],
    "cluster": ["configs"],
    "trainer": ["configs", "data_pipeline", "model"],
}


@pytest.mark.parametrize("folder", ROOMS)
def test_imports_point_one_way(folder: str) -> None:
    rooms = ROOMS[folder].split()
    here = [path.stem for path in (ROOT / folder).iterdir() if path.suffix == ".py"] + [
        path.name for path in (ROOT / folder).iterdir() if (path / "__init__.py").exists()
    ]
    of_ours = set(here) - {"__init__", "tests"}
    differ = sorted(of_ours.symmetric_difference(rooms))
    assert not differ, f"rooms that are only listed in ROOMS, or only in {folder}: {differ}"
    assert len(rooms) == len(of_ours), "the list of rooms has to name each of them once"
    height = {room: number for number, room in enumerate(rooms)}
    prefix = "" if folder == "." else folder.replace("/", ".") + "."
    back = [
        f"{importer} -> {imported}"
        for room in rooms
        for importer, imported in _imports(ROOT / folder, room)
        if (target := _room(imported, prefix)) in height and height[target] > height[room]
    ]
    assert not back


@pytest.mark.parametrize("folder", KNOWN)
def test_a_folder_imports_only_those_that_are_listed(folder: str) -> None:
    found = {_room(imported, "") for _, imported in _imports(ROOT, folder)}
    assert found.intersection(ROOMS["."].split()) <= {folder, *KNOWN[folder]}


def test_an_arrow_back_up_is_seen(tmp_path: Path) -> None:
    (tmp_path / "low.py").write_text("def f():\n    from house.high import g\n")
    assert [found for _, found in _imports(tmp_path, "low")] == ["house.high", "house.high.g"]
    assert _room("house.high.g", "house.") == "high"
    assert _room("elsewhere.high", "house.") is None


def _room(module: str, prefix: str) -> str | None:
    return module.removeprefix(prefix).split(".")[0] if module.startswith(prefix) else None


def _imports(folder: Path, room: str) -> Iterator[tuple[str, str]]:
    """(file, imported module or name of a module) for all files in a room."""
    files = sorted((folder / room).rglob("*.py")) or [folder / f"{room}.py"]
    for file in files:
        yield from ((str(file), name) for name in _imported(file))


@functools.cache
def _imported(file: Path) -> list[str]:
    """The modules and the names of modules that a file imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    return names
