"""An installed tandem requires what it imports, and does not require what only its tests import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import distributions, packages_distributions

import pytest
from packaging.specifiers import SpecifierSet

from tests.conftest import REPOSITORY, command_environment

SHIPPED = ("cluster", "commands", "configs", "data_pipeline", "model", "trainer")
FILES = [REPOSITORY / "tandem.py", *(f for d in SHIPPED for f in (REPOSITORY / d).rglob("*.py"))]


def imported(tree: ast.AST) -> set[str]:
    """The top-level packages that a module imports anywhere, including by constant names."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return {name.partition(".")[0] for name in found}


def asked_for() -> set[str]:
    """The distributions in `dependencies` and in the extras that users install."""
    text = (REPOSITORY / "pyproject.toml").read_text().partition("dev = [")[0]
    return set(re.findall(r'"([\w-]+)>=', text.partition("dependencies = [")[2].lower()))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 knows few packages' modules")
def test_every_package_that_is_imported_is_asked_for():
    found = set().union(*(imported(ast.parse(file.read_text())) for file in FILES))
    others = found - {*SHIPPED, "tandem", *sys.stdlib_module_names}
    distributions = packages_distributions()
    unasked = {
        name for name in others if not asked_for() & {*map(str.lower, distributions.get(name, []))}
    }
    assert "torch" in others
    assert unasked == set()
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert "transformers" not in text.partition("[project.optional-dependencies]")[0]


def test_pinned_packages_take_the_first_patch_release_of_this_python():
    """Debian 12 has Python 3.11.2, on which a pin that needs 3.11.5 makes `make setup` fail."""
    first = f"{sys.version_info.major}.{sys.version_info.minor}.0"
    pins = (REPOSITORY / "constraints.txt").read_text()
    asked = {
        f"{it.name}=={it.version}": SpecifierSet(it.metadata.get("Requires-Python") or "")
        for it in distributions()
    }
    pinned = {pin: python for pin, python in asked.items() if pin in pins}
    assert "packaging" in " ".join(pinned)
    assert [pin for pin, python in pinned.items() if first not in python] == []


TRAINS = """
import os
import sys
import torch
import trainer.run
import trainer.tracking.wandb_tracker
from model import EncoderConfig, build
tiny = {"layers": 1, "hidden_size": 8, "ffn_size": 8, "heads": 1, "vocab_size": 9}
model = build(EncoderConfig(**tiny), 0)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
optimizer.step()
optimizer.zero_grad()
print("transformers" in sys.modules, os.environ["WANDB_ERROR_REPORTING"])
"""


def test_training_imports_no_transformers_and_nothing_that_speaks():
    """DeepSpeed would print which device it guesses, and W&B report crashes to a third party."""
    environment = command_environment()
    for variable in ("DS_ACCELERATOR", "WANDB_ERROR_REPORTING"):
        environment.pop(variable, None)
    done = subprocess.run(
        [sys.executable, "-c", TRAINS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("False false\n", "")
