"""`trainer train` and `trainer cache`: plan, probe what was never measured, watch over the run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import GivenPath, Layers, config_arguments_and_machine
from trainer.cli.output import say, shown_below_options

if TYPE_CHECKING:
    from trainer.planning.plan import Plan


@shown_below_options
@click.command()
@config_arguments_and_machine
@click.option("--no-probe", is_flag=True, help="Do not measure kernels that have no verdict yet.")
@click.option("--share-gpu", is_flag=True, help="Start also on a GPU that a job of `trainer queue` has.")
def train(layers: Layers, no_probe: bool, share_gpu: bool) -> int:
    """Train, prove and save: a LoRA or a full fine-tune, as the configuration says.
    \f
    Examples:
      trainer train train_configs/flux1_dev_lora.yaml --dataset /data --output /output/my-lora
      trainer train my.yaml --set train.max_train_steps=500 --set features.weights=int8

    The same command again resumes a run that was stopped. SIGTERM and Ctrl-C save first.
    """
    from trainer.cli.jobs import (
        follow_job,
        require_free_memory,
        require_startable,
        run_job,
    )
    from trainer.cli.measure import planned_in_free_memory
    from trainer.cli.other_hosts import telling
    from trainer.cli.places import place_of_start
    from trainer.config import environment
    from trainer.engine.spec import Job
    from trainer.planning.data_rows import require_dataset, require_present, require_template, with_data
    from trainer.planning.epochs import with_epochs
    from trainer.planning.kept_decisions import continued
    from trainer.planning.render import plan_text
    from trainer.planning.scoring_row import with_scoring
    from trainer.queue.beside import kept_from_queue, require_free

    place = place_of_start()
    if place.launch.rank:
        return follow_job(place.launch, "train")
    with telling(place.hosts):
        require_dataset(layers.dataset)
        loaded = with_epochs(continued(place.reconciled(layers.load())))
        port = environment.metrics_port()
        require_startable(loaded, port=port, writes_run=True)
        require_present(loaded)

        def look(plan: Plan) -> None:
            if not share_gpu:
                require_free(_uuids(plan))

        facts, plan = planned_in_free_memory(loaded, probe=not no_probe, first=look)
        require_template(loaded)
        plan = with_scoring(with_data(plan, loaded.config), loaded)
        say(plan_text(plan), err=True)  # stdout belongs to results
        with kept_from_queue(_uuids(plan), share=share_gpu, tell=functools.partial(say, err=True)):
            require_free_memory(plan, facts)
            return run_job(loaded, facts, plan, Job(mode="train"), port=port)


def _uuids(plan: Plan) -> list[str]:
    """UUIDs of the GPUs of a plan; none of the CPU."""
    from trainer.machine.driver import visible_uuids

    order = visible_uuids() if plan.device == "cuda" else ()
    return [order[place] for place in plan.devices if place < len(order)]


@shown_below_options
@click.command()
@config_arguments_and_machine
@click.option("--verify", is_flag=True, help="Read every entry and encode damaged ones again.")
@click.option(
    "--prune",
    is_flag=True,
    help="Then remove the family's entries that this run does not use; none while another uses the cache.",
)
@click.option(
    "--import-pt",
    metavar="DIR",
    type=GivenPath(exists=True, file_okay=False),
    help="First take in another trainer's .pt files, one an image (docs/data.md).",
)
def cache(layers: Layers, verify: bool, prune: bool, import_pt: Path | None) -> int:
    """Encode images and captions ahead of a run; `train` then starts at once.
    \f
    Examples:
      trainer cache my.yaml
      trainer cache my.yaml --verify --prune
    """
    from trainer.cli.jobs import follow_job, require_startable, run_job
    from trainer.cli.measure import planned
    from trainer.cli.other_hosts import telling
    from trainer.cli.places import place_of_start
    from trainer.engine.spec import Job
    from trainer.planning.data_rows import require_dataset, require_present, require_template

    place = place_of_start()
    if place.launch.rank:
        return follow_job(place.launch, "cache")
    with telling(place.hosts):
        require_dataset(layers.dataset)
        loaded = place.reconciled(layers.load())
        require_startable(loaded)
        require_present(loaded)
        import_folder = str(import_pt.absolute()) if import_pt else ""
        job = Job(mode="cache", verify=verify, prune=prune, import_folder=import_folder)
        facts, plan = planned(loaded, probe=False)
        require_template(loaded)
        return run_job(loaded, facts, plan, job)
