"""The model card states the data and training, and the Hub can read its front matter."""

import dataclasses
from pathlib import Path

import yaml

import model
from model.kinds.seq2seq import Seq2SeqConfig

SMALL = model.EncoderConfig(vocab_size=50, hidden_size=16, layers=2, heads=2, ffn_size=24)
TRAINING = model.Training(
    data="prose, 1.2M tokens",
    steps=1800,
    tokens=14_745_600,
    learning_rate=3e-4,
    seed=7,
    base="models/bert",
    scored="Held-out text of prose",
    objectives={"mlm": "weight 2.0", "soft_kl": "weight 5.0, temperature 2.0"},
    metrics={"masked-LM loss": 4.3219, "accuracy": 0.213},
    teacher="demo_teacher, in the same job",
    license="apache-2.0",
    revision="abc1234",
)


def test_it_holds_everything_about_the_training() -> None:
    text = model.model_card("student", SMALL, TRAINING)
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "apache-2.0"
    assert body.startswith("# student\n")
    assert "\n## Held-out text of prose\n" in body
    for fact in ("prose, 1.2M tokens", "1,800", "14,745,600", "temperature 2.0", "4.3219",
                 "demo_teacher, in the same job", "Learning rate: 0.0003", "Seed: 7",
                 "Base model: models/bert", "apache-2.0", "abc1234", "2 layers"):  # fmt: skip
        assert fact in body


def test_a_model_whose_head_is_not_trained_is_said_to_predict_nothing() -> None:
    untrained = dataclasses.replace(TRAINING, metrics={}, predicts=False)
    _, front, body = model.model_card("student", SMALL, untrained).split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == "feature-extraction"
    assert "head is not trained" in body
    _, front, body = model.model_card("student", SMALL, TRAINING).split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == "fill-mask"
    assert "not trained" not in body


def test_a_model_is_from_random_weights_only_where_it_has_no_base() -> None:
    alone = dataclasses.replace(TRAINING, teacher="")
    assert "from scratch" not in (text := model.model_card("tuned", SMALL, alone))
    assert "- Teacher: none\n" in text
    random = dataclasses.replace(TRAINING, base="")
    assert "Base model: none, its weights began at random" in model.model_card("a", SMALL, random)


def test_a_fine_tuned_model_names_its_head() -> None:
    config = dataclasses.replace(SMALL, mlm_head=False)
    head = model.TaskHeadConfig("tagging", ["O", "B-PER"])
    config = model.with_task_head(config, "names", head)
    training = dataclasses.replace(TRAINING, predicts=False)
    _, front, body = model.model_card("tagger", config, training).split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == "token-classification"
    assert yaml.safe_load(front)["tags"] == ["tandem"]
    assert "Head `names`: tagging (O, B-PER)." in body
    assert "masked" not in body.partition("## Held-out")[0]
    assert 'pipeline("token-classification", model=".")' in body


def test_a_model_of_our_own_format_shows_the_command_that_reads_it() -> None:
    config = dataclasses.replace(SMALL, mlm_head=False)
    assert "tandem embed . '" in model.model_card("a", config, TRAINING, False)
    for name, kind, labels in (("names", "tagging", ["O", "B-PER"]), ("answers", "span", [])):
        config = model.with_task_head(config, name, model.TaskHeadConfig(kind, labels))
    assert "| tandem predict . - --head names\n" in model.model_card("a", config, TRAINING, False)
    only = dataclasses.replace(config, task_heads={"answers": config.task_heads["answers"]})
    assert "tandem predict . questions.json\n" in model.model_card("a", only, TRAINING, False)


def test_every_saved_folder_has_a_model_card(tmp_path: Path) -> None:
    model.save_pretrained(model.build(SMALL, 0), tmp_path / "mine")
    text = (tmp_path / "mine" / "README.md").read_text()
    assert "# mine" in text
    assert "not recorded" in text
    assert "\nIt loads with `transformers` 4.57 or newer, 5 included.\n" in text
    ours = dataclasses.replace(SMALL, pooler="first")
    model.save_pretrained(model.build(ours, 0), tmp_path / "ours")
    text = (tmp_path / "ours" / "README.md").read_text()
    assert "library_name" not in text
    assert "\nIt loads with Tandem: `transformers` has no class for it.\n" in text


def test_a_model_that_translates_is_none_that_fills_masks() -> None:
    config = Seq2SeqConfig(vocab_size=50, hidden_size=16, layers=2, heads=2, ffn_size=24)
    _, front, body = model.model_card("captions", config, TRAINING).split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == "translation"
    assert "A sequence-to-sequence model with" in body
    assert "masked language model" not in body
