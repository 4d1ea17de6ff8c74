"""The command line, and the public Python API, which `commands/api.py` documents.

The commands are in `commands/`, and import what they need when they run.

Exit codes: 0 done; 1 failed, with one line that says what to change; 2 wrong usage; 75 stopped on
request after saving (start it again to resume).
"""

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parent
_PACKAGES = ("cluster", "commands", "configs", "data_pipeline", "model", "trainer")


class _PackagesHere:
    """An import hook that finds Tandem's packages only in this file's folder.

    Python looks first in the user's folder, which may have a `configs/` or a `model.py` of its own.
    """

    @staticmethod
    def find_spec(
        name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The package of this name; None for every other module."""
        return PathFinder.find_spec(name, [str(_FOLDER)]) if name in _PACKAGES else None


for _name in _PACKAGES:
    _file = getattr(sys.modules.get(_name), "__file__", None)
    if _file is not None and _FOLDER not in Path(_file).resolve().parents:
        raise ImportError(
            f"{_file} has the name of a package of Tandem, `{_name}`: import tandem before it, or "
            "rename it"
        )
sys.meta_path.insert(0, _PackagesHere)

try:
    import click

    from commands import (
        analysis,
        data,
        embedding,
        finetuning,
        listing,
        models,
        prediction,
        results,
        runs,
        starting,
        tokenizers,
        training,
    )
    from commands.api import (
        build_corpus,
        embed,
        evaluate,
        export,
        from_pretrained,
        load,
        predict,
        train,
    )
    from commands.ending import end_at_once_on_interrupt, unwind_all
    from commands.errors import OneLineErrors
    from commands.options import VERSION
except KeyboardInterrupt:  # most of the time of a short command passes here
    sys.exit("tandem: interrupted")

__all__ = [
    "build_corpus",
    "embed",
    "evaluate",
    "export",
    "from_pretrained",
    "load",
    "main",
    "predict",
    "train",
]


@click.group(
    cls=OneLineErrors,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@VERSION
def main() -> None:
    """Pre-train a BERT-family teacher and distil students from it, in one job."""
    click.get_current_context().call_on_close(end_at_once_on_interrupt)  # before libraries' ends
    gc.set_threshold(700, 1000)  # looking for garbage took a fifth of the time of imports


for command in (
    tokenizers.tokenizer,
    data.data,
    training.train,
    training.rehearse,
    training.store,
    finetuning.finetune,
    runs.submit,
    runs.preflight,
    runs.status,
    runs.stop,
    runs.checkpoint,
    runs.fork_run,
    runs.sync,
    models.describe_models,
    models.plan_job,
    models.import_model,
    starting.init,
    listing.list_names,
    listing.print_schema,
    results.evaluate,
    results.export,
    embedding.embed,
    prediction.predict,
    analysis.analyze,
):
    main.add_command(command)
# The commands in `but` stop on request, resume unfinished work, or run for long in libraries where
# Python handles no signal.
unwind_all(
    main,
    but=["train", "rehearse", "store", "finetune", "evaluate", "data build", "tokenizer train"],
)


if __name__ == "__main__":
    main(prog_name="tandem")
