"""Ranks that are forks of a command whose OpenMP threads have worked would wait for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tandem
from commands import finetuning, training
from model import EncoderConfig, build, save_pretrained
from tests.conftest import command_environment


class Loaded(Exception):
    """Ends a command where it reads its config."""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (training, ["train", "single_sentence"]),
        (finetuning, ["finetune", "single_sentence", "--model", "."]),
        (finetuning, ["finetune", "single_sentence", "--model", ".", "--seeds", "1,2"]),
    ],
)
def test_a_command_computes_in_one_thread_before_it_forks_ranks(module, words, monkeypatch) -> None:
    threads = torch.get_num_threads()

    def load(*_: object) -> None:
        raise Loaded(torch.get_num_threads())

    monkeypatch.setattr(module, "load_job", load)
    torch.set_num_threads(3)
    try:
        done = CliRunner().invoke(tandem.main, words)
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
    assert isinstance(done.exception, Loaded)
    assert done.exception.args == (1,)
    assert after == 3


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has one thread")
@pytest.mark.parametrize("threads", ["2", "0"])
def test_a_task_trains_in_several_threads_from_a_model_that_several_have_read(
    threads: str, corpus: Path, tmp_path: Path
) -> None:
    """Its tensors are so large that torch shares an operation on one among threads.

    A number of 0 leaves the choice to torch, as its libraries do.
    """
    shape = {"hidden_size": 128, "layers": 1, "heads": 2, "ffn_size": 16, "max_positions": 32}
    config = EncoderConfig(vocab_size=600, **shape)
    save_pretrained(build(config, seed=1), tmp_path / "model", corpus.parent / "tokenizer")
    rows = "".join(f"{word} here\t{word}\n" for word in ("was", "is") * 20)
    (tmp_path / "train.tsv").write_text(f"text\tlabel\n{rows}")
    words = ["teacher.init.pretrained=model", "data.train=train.tsv", "epochs=1", "name=threads"]
    words += ["data.sequence_length=16"]
    command = [sys.executable, "-m", "tandem", "train", "single_sentence", *words, "--nproc", "1"]
    environment = command_environment(OMP_NUM_THREADS=threads)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
