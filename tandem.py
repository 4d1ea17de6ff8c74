"""The command line. Its commands are in `commands/`, and import what they need when they run.

Exit codes: 0 done; 1 failed, with one line that says what to change; 2 wrong usage; 75 stopped on
request after saving (start it again to resume).
"""

from __future__ import annotations

import click

from commands import (
    analysis,
    data,
    embedding,
    finetuning,
    models,
    prediction,
    results,
    runs,
    schema,
    storing,
    submission,
    tokenizers,
    training,
)
from commands.ending import unwind_all
from commands.errors import OneLineErrors


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Pre-train a BERT-family teacher and distil students from it, in one job."""


for command in (
    tokenizers.tokenizer,
    data.data,
    training.train,
    storing.store,
    finetuning.finetune,
    submission.submit,
    submission.status,
    runs.stop,
    runs.checkpoint,
    runs.fork_run,
    runs.sync,
    models.describe_models,
    models.plan_job,
    models.import_model,
    schema.print_schema,
    results.evaluate,
    results.export,
    embedding.embed,
    prediction.predict,
    analysis.analyze,
):
    main.add_command(command)
# These stop on request, resume what is left undone, or run for long in libraries where Python
# handles no signal.
unwind_all(main, but=["train", "store", "finetune", "evaluate", "data build", "tokenizer train"])


if __name__ == "__main__":
    main()
