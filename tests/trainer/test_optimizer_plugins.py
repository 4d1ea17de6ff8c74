"""An optimizer in a user's file, named by `plugins:`, with three states for each parameter."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.errors import ConfigError
from configs.kinds import import_plugins, in_plugin, require_returned
from model import Model, ModelConfig
from model.protocol import register as register_model
from tests.conftest import TINY_JOB, tandem
from trainer.checkpoint.folder import step_name
from trainer.checkpoint.manifest import read_manifest
from trainer.errors import TrainingError
from trainer.optimizers.config import AdamConfig, register_optimizer
from trainer.optimizers.gated import GatedOptimizer, build_optimizer
from trainer.run_folder import metrics
from trainer.tracking.kinds.tensorboard import TensorBoard
from trainer.tracking.trackers import register_tracker

PLUGIN = '''
"""AMSGrad."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from configs.rules import OneOf
from trainer.optimizers.config import KIND, AdamConfig, register_optimizer


@register_optimizer
@dataclass
class AmsgradConfig(AdamConfig):
    """AMSGrad (Reddi et al., arXiv 1904.09237)."""

    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    kind: Annotated[str, OneOf("amsgrad"), KIND] = "amsgrad"

    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, self.learning_rate, *self.moments, amsgrad=True)
'''


@pytest.fixture
def words(tmp_path: Path, corpus: Path) -> list[object]:
    (tmp_path / "amsgrad.py").write_text(PLUGIN)
    return [
        TINY_JOB, f"data.path={corpus}", f"output_dir={tmp_path}",
        f"plugins=[{tmp_path}/amsgrad.py]", "students=null", "teacher.optimizer.kind=amsgrad",
        "teacher.zero_stage=2", "steps=4", "evaluation.every=4",
    ]  # fmt: skip


def test_a_users_optimizer_is_trained_on_two_ranks_and_resumed_on_one_at_another_stage(
    words: list[object], tmp_path: Path
) -> None:
    trained = tandem("train", *words, "--nproc", 2)
    assert trained.returncode == 0, trained.stderr
    forked = tandem(
        "fork", tmp_path / "tiny", "--step", 2, "--name", "other", "teacher.zero_stage=3"
    )
    assert forked.returncode == 0, forked.stderr
    manifest = read_manifest(tmp_path / "tiny" / "checkpoints" / step_name(4))
    tensors = manifest.learners["teacher"].tensors.values()
    assert {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"} < set().union(*(t.states for t in tensors))
    resumed = tandem("train", tmp_path / "other" / "config.yaml")
    assert resumed.returncode == 0, resumed.stderr
    losses = [
        [row["teacher/loss"] for row in metrics.read(tmp_path / name / "metrics.jsonl")
         if "teacher/loss" in row]
        for name in ("tiny", "other")
    ]  # fmt: skip
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_an_optimizer_without_build_is_one_line(words: list[object], tmp_path: Path) -> None:
    plugin = tmp_path / "amsgrad.py"
    plugin.write_text(PLUGIN.replace("def build(", "def built("))
    ended = tandem("train", *words)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.search(rf"{plugin}:\d+: TypeError: \w+ has to define build\n$", ended.stderr)


FAILING = """
        return Failing(groups, self.learning_rate, *self.moments)


class Failing(torch.optim.AdamW):
    def step(self, closure=None):
        return self.missing[0]
"""


def test_what_fails_in_a_plugin_is_named_by_its_line(words: list[object], tmp_path: Path) -> None:
    """The traceback is in the rank's log, or below the line where there is none."""
    plugin = tmp_path / "amsgrad.py"
    (last,) = [line for line in PLUGIN.splitlines() if "return torch" in line]
    plugin.write_text(PLUGIN.replace(f"{last}\n", FAILING))
    number = plugin.read_text().splitlines().index("        return self.missing[0]") + 1
    said = "AttributeError: 'Failing' object has no attribute 'missing'"
    ended = tandem("train", *words, "--nproc", 2)
    assert ended.returncode == 1
    function = "Failing.step" if sys.version_info >= (3, 11) else "step"
    assert ended.stderr == f"tandem: plugins: {plugin}:{number}: {function}: {said}\n"
    assert "Traceback" in (tmp_path / "tiny" / "logs" / "rank-000.log").read_text()
    plugin.write_text(f"{PLUGIN}\nmissing\n")
    ended = tandem("train", *words)
    assert ended.returncode == 1
    assert re.fullmatch(rf"tandem: .*: plugins: {plugin}:\d+: NameError: .*\n", ended.stderr)
    plugin.write_text(f"{PLUGIN}\n    def __post_init__(self):\n        missing\n")
    ended = tandem("train", *words)
    assert ended.returncode == 1
    first, then = ended.stderr.splitlines()[:2]
    assert re.search(rf"tandem: plugins: {plugin}:\d+: .*__post_init__: NameError: ", first)
    assert then.startswith("Traceback")


def test_a_function_of_a_plugin_that_does_not_take_its_arguments_is_named(tmp_path: Path) -> None:
    """Python raises that in the caller, so no frame of the plugin is in the traceback."""
    plugin = tmp_path / "short.py"
    plugin.write_text("class Short:\n    def loss(self, log_q):\n        return log_q\n")
    import_plugins([str(plugin)])
    (module,) = [m for m in sys.modules.values() if getattr(m, "__file__", "") == str(plugin)]
    with pytest.raises(TypeError) as raised:
        module.Short().loss(1, 2, 3)
    said = "Short.loss() takes 2 positional arguments but 4 were given"
    assert str(in_plugin(raised.value)) == f"plugins: {plugin}:2: TypeError: {said}"
    assert in_plugin(TypeError("Other.loss() takes 2 positional arguments")) is None


def test_an_optimizer_a_head_and_a_loss_of_another_type_are_refused() -> None:
    class Forgetful(AdamConfig):
        def build(self, groups):  # type: ignore[no-untyped-def]
            return None

    rates: Any = SimpleNamespace(group=lambda name: "all", factor=lambda group, step: 1.0)
    said = r"^Forgetful\.build: must return Optimizer, not NoneType$"
    with pytest.raises(ConfigError, match=said):
        build_optimizer(torch.nn.Linear(2, 2), Forgetful(), rates)
    with pytest.raises(ConfigError, match=r"^Mine\.loss: must return Tensor, not tuple$"):
        require_returned((1, 2), torch.Tensor, "Mine.loss")


def test_states_that_the_config_does_not_name_are_refused() -> None:
    """They would be taken for those of another kind, and begin anew in each step."""
    parameter = torch.nn.Parameter(torch.ones(3))
    group = {"params": [parameter], "states": ("exp_avg", "exp_avg_sq"), "lr": 0.1}
    optimizer = GatedOptimizer(torch.optim.RMSprop([group]))
    parameter.grad = torch.ones(3)
    said = "RMSprop: keeps square_avg for each parameter, and `states` of its config names exp_avg,"
    with pytest.raises(TrainingError, match=re.escape(said)):
        optimizer.step()


def test_what_cannot_be_registered_is_named() -> None:
    def registered(**changes: object) -> None:
        config = type("Mine", (AdamConfig,), {"build": AdamConfig.moments, **changes})
        register_optimizer(dataclasses.dataclass(config) if "kind" in changes else config)

    with pytest.raises(TypeError, match="Mine has to be a @dataclass"):
        registered()
    with pytest.raises(TypeError, match="Mine is called adamw, as another is"):
        registered(kind="adamw", __annotations__={"kind": str})
    with pytest.raises(TypeError, match="dict has to derive from OptimizerConfig"):
        register_optimizer(dict)
    with pytest.raises(TypeError, match="TensorBoard is called tensorboard, as another is"):
        register_tracker("tensorboard")(TensorBoard)
    with pytest.raises(TypeError, match="Encoderless has to define encode, fill, flops_per_token"):
        register_model(ModelConfig)(type("Encoderless", (Model,), {}))
