"""Commands for models: sizes, plans, and import from Hugging Face."""

import dataclasses
from typing import Any

import click

from cluster.planning.machine import Machine
from commands.job_configs import load_job, models, prepare, warn_about
from commands.options import PATH, POSITIVE, Number
from configs.typed import shown


@click.command("model")
@click.argument("config", type=PATH)
@click.option(
    "--length",
    type=click.IntRange(min=1),
    help="Tokens per sequence, for the FLOPs. Default: the job's longest; for a model at most 512.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def describe_models(config: str, length: int | None, as_json: bool) -> None:
    """Count parameters, bytes and FLOPs of a model or a job.

    CONFIG is a model or a job: a file, or a name of `tandem list`.
    """
    from configs.strict_json import strict_json
    from model import describe

    sizes = {
        name: describe(config_of, length or its, masked)
        for name, config_of, its, masked in models(config)
    }
    if as_json:
        plain = {name: dataclasses.asdict(size) for name, size in sizes.items()}
        click.echo(strict_json(plain if len(plain) > 1 else next(iter(plain.values()))))
        return
    for name, size in sizes.items():
        click.echo(
            f"{name}: {size.parameters:,} parameters and {size.head_parameters:,} in its heads, "
            f"{size.bytes / 2**20:,.0f} MiB in float32, {size.flops_per_token / 1e6:,.1f} MFLOPs "
            f"per token forward and backward at {size.sequence_length} tokens"
        )


def time_limit(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """The seconds of a time limit as sbatch takes it; None for no limit."""
    from cluster.slurm import seconds

    try:
        return None if text is None else seconds(text)
    except ValueError:
        raise click.BadParameter(f"{shown(text)}: must be a time such as 24:00:00 or 2-0") from None


@click.command("plan")
@click.argument("config", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--nodes", type=click.IntRange(min=1), default=Machine.nodes, help="Nodes of the job."
)
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=1),
    help="GPUs of each node.  [8; for a consumer card: 1]",
)
@click.option(
    "--device",
    type=PATH,
    default="h100",
    help="The GPU, or cpu: a name of `tandem list devices`, or a file.",
)
@click.option(
    "--mfu",
    type=Number(1e-6, 1),
    default=Machine.mfu,
    help="The fraction of the GPU's peak that forward and backward reach.",
)
@click.option("--price", type=Number(0), help="Price of a GPU hour, in any currency.")
@click.option(
    "--node-mtbf-hours",
    type=POSITIVE,
    default=Machine.node_mtbf_hours,
    help="Mean hours between the failures of a node.",
)
@click.option(
    "--restart-seconds",
    type=Number(0, 1e9),
    default=Machine.restart_seconds,
    help="Seconds from a failure until training continues.",
)
@click.option(
    "--store-gbs",
    type=POSITIVE,
    default=Machine.store_gbs,
    help="GB/s at which checkpoints reach the storage.",
)
@click.option(
    "--time",
    "time_limit",
    callback=time_limit,
    help="The time limit of each start, written as for sbatch: 24:00:00, or 2-0.",
)
@click.option(
    "--warning-seconds",
    type=click.IntRange(min=1),
    default=Machine.warning_seconds,
    help="Seconds before the time limit at which the ranks save.",
)
@click.option(
    "--host-gb",
    type=Number(0),
    default=Machine.host_gb,
    help="Host memory of each rank for Python, libraries and the GPU's driver, in GB.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan_job(
    config: str,
    overrides: tuple[str, ...],
    device: str,
    gpus_per_node: int | None,
    as_json: bool,
    **machine: Any,
) -> None:
    """Estimate memory, time, cost and failures of the job CONFIG."""
    import gc

    import configs
    from cluster.planning.plan import make_plan, undivided
    from cluster.planning.text import describe
    from configs.devices import DeviceConfig
    from trainer.footprint.demands import demands, demands_apart
    from trainer.job_data.counting import rows_by_step
    from trainer.job_data.fit import require_room

    gc.freeze()  # no collection, nor the interpreter's end, walks over what is imported: 0.5 s
    accelerator = configs.load(device, DeviceConfig, "device")
    if accelerator.is_cpu and gpus_per_node not in (None, 1):
        raise click.UsageError(f"--gpus-per-node: --device {device} has none; leave it out")
    ranks = gpus_per_node or accelerator.per_node
    on = Machine(accelerator, gpus_per_node=ranks, **machine)
    job = prepare(load_job(config, overrides))
    warn_about(job)
    require_room(job)
    facts = demands(job)
    plan = make_plan(facts, on, demands_apart(job, facts.learners))
    if uneven := undivided(rows_by_step(job).values(), on):
        click.echo(f"warning: {uneven}; as it is, the job does not start there", err=True)
    click.echo(plan.to_json() if as_json else describe(plan))


@click.command("import")
@click.argument("folder", type=PATH)
@click.option("--out", type=PATH, required=True, help="The folder to write.")
def import_model(folder: str, out: str) -> None:
    """Convert a Hugging Face checkpoint into a teacher or student."""
    from model import describe, import_folder

    size = describe(import_folder(folder, out).config)
    click.echo(f"{size.parameters:,} parameters are in {out}; a job can use {out}/model.yaml")
