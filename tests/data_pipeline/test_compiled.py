"""Compiled loops: when they cannot be cached, and when they are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from numba import types
from numba.core.dispatcher import Dispatcher

from data_pipeline.text import sentence_search
from data_pipeline.text.compiled import compiled, interruptible
from data_pipeline.text.joined_text import JoinedText
from tests.data_pipeline.conftest import make_documents
from tests.waiting import until


def test_what_cannot_be_kept_on_disk_is_compiled_all_the_same() -> None:
    module: dict = {}
    exec("def double(number): return 2 * number", module)  # in no file, so beside none
    assert compiled(module["double"])(21) == 42


def test_the_cache_pickles_no_class_of_this_project() -> None:
    """Otherwise reading it would fail once the class is renamed."""
    sentence_search.find_sentences(
        JoinedText.of([f"One sentence. Another of Mr. Smith {number}." for number in range(3)])
    )
    compiled_ones = [one for one in vars(sentence_search).values() if isinstance(one, Dispatcher)]
    signatures = [signature for one in compiled_ones for signature in one.signatures]
    assert signatures
    assert not [
        argument
        for signature in signatures
        for argument in signature
        if isinstance(argument, types.BaseNamedTuple)
    ]


def test_an_interrupt_that_became_a_system_error_is_one_again() -> None:
    def interrupted(by: BaseException) -> None:
        try:
            try:
                raise by
            except BaseException as error:
                raise SystemError("returned a result with an exception set") from error
        except SystemError as error:
            raise SystemError("returned a result with an exception set") from error

    with pytest.raises(KeyboardInterrupt), interruptible():
        interrupted(KeyboardInterrupt())
    with pytest.raises(SystemError), interruptible():
        interrupted(ValueError())


def test_ctrl_c_ends_a_build_with_one_word(tmp_path: Path, tokenizer_dir: Path) -> None:
    """All processes get the signal at once, as from a terminal."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("\n\n".join(make_documents(40000, 7)))
    command = [sys.executable, "-m", "tandem", "data", "build", text]
    process = subprocess.Popen(
        [*command, "--tokenizer", tokenizer_dir, "--out", out, "--workers", "2"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until((out / "train").exists, "the first shard")
    time.sleep(0.7)  # others are at work
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert said.split()[-1] == "Aborted!"
    # Python ends by the signal where that interrupts an `exec` of source text, as in a dataclass.
    assert process.returncode in (1, -signal.SIGINT)
    assert "Traceback" not in said
    assert not (out / "corpus.json").exists()
