"""The plan of a run on this machine, with kernels measured where verdicts are missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.cli.output import say
from trainer.planning.shapes.shape_classes import shape_class

if TYPE_CHECKING:
    from trainer.config.reading.load import Loaded
    from trainer.engine.probing.probe import Probed
    from trainer.machine.facts import Facts
    from trainer.planning.plan import Plan

KINDS = ("attention", "matmul")
"""First parts of kernels' names."""
_MOST_PROBES = 3
"""With verdicts a step's samples may be parted in another way, and kernels have other shapes."""


def planned(loaded: Loaded, *, probe: bool) -> tuple[Facts, Plan]:
    """This machine's facts and the run's plan; with `probe`, kernels without a verdict are measured first.

    A run that kept verdicts alone would refuse is measured anew before it is refused.
    """
    from trainer.planning.choose.situation import KernelsFailedError
    from trainer.planning.planning import machine_facts, plan_run, prepare_base, requested_profile

    prepare_base(loaded)
    facts, profile = machine_facts(), requested_profile()
    features = loaded.config.features
    asked = {"attention": features.attention, "matmul": features.compute}
    kinds = tuple(kind for kind, value in asked.items() if value == "auto")
    try:
        plan = plan_run(loaded, facts, profile)
    except KernelsFailedError as error:
        if not probe:
            raise
        say(f"{error.problems[0].what}: measured again", err=True)
        facts, kinds = _without_failed(facts), KINDS
        plan = plan_run(loaded, facts, profile)
    if not (probe and plan.device == "cuda"):
        return facts, plan
    if features.loader == "auto":
        facts = measure_reading(loaded, facts, plan)
        plan = plan_run(loaded, facts, profile)
    unsettled: set[tuple[str, str, str]] = set()
    for _ in range(_MOST_PROBES):
        measured = measure_kernels(loaded, facts, plan, kinds, unsettled)
        if measured == facts:
            break
        facts, plan = measured, plan_run(loaded, measured, profile)
    return facts, plan


def measured_anew(loaded: Loaded, facts: Facts) -> Facts:
    """The facts with every kernel measured at the run's shape, whatever was kept.

    Kept verdicts have no part in the plan that gives the shape, so that none of them can prevent this.
    """
    import dataclasses

    from trainer.machine.verdicts import merged
    from trainer.planning.choose.situation import KernelsFailedError
    from trainer.planning.planning import plan_run, requested_profile

    fresh, profile = dataclasses.replace(facts, verdicts=()), requested_profile()
    plan = plan_run(loaded, fresh, profile)
    unsettled: set[tuple[str, str, str]] = set()
    for _ in range(_MOST_PROBES):
        measured = measure_kernels(loaded, fresh, plan, KINDS, unsettled)
        if measured == fresh:
            break
        fresh = measured
        try:
            plan = plan_run(loaded, fresh, profile)
        except KernelsFailedError as error:
            say(f"warning: {error}", err=True)
            break
    if plan.device == "cuda":
        facts = measure_reading(loaded, facts, plan, anew=True)
    return dataclasses.replace(facts, verdicts=merged(facts.verdicts, fresh.verdicts))


def measure_reading(loaded: Loaded, facts: Facts, plan: Plan, *, anew: bool = False) -> Facts:
    """The facts with rates of both loaders on the disk of the run's base model, where they can be measured.

    Once for each disk, and with `anew` again, then also saying why not.
    """
    import dataclasses

    from trainer import families
    from trainer.cli.jobs import child_environment
    from trainer.config import environment
    from trainer.engine.probing.reading import largest, probe_reading
    from trainer.files.weight_files import weight_files
    from trainer.machine.verdicts import FILE_NAME, write_readings
    from trainer.modeling.base.base import local_folder
    from trainer.planning.choose import loading
    from trainer.planning.planning import weights_folder

    base, family = local_folder(loaded.config), families.get(loaded.config.family)
    disk = loading.disk_of(weights_folder(family, base))
    if loading.was_measured(facts, disk) and not anew:
        return facts
    file = largest(weight_files(base / family.trained_component).files) if base and disk else None
    obstacle = loading.unmeasured(facts, disk) or ("" if file else "its files are small")
    if obstacle or file is None:
        if anew:
            say(f"reading the base model is not measured: {obstacle}", err=True)
        return facts
    say(f"measuring once how {file.name} is read from {disk}", err=True)
    found, trouble = probe_reading(file, disk, child_environment(plan, facts))
    for row in found:
        say(f"  {row.loader}, {row.state}: {_rate(row.gib_per_second)}", err=True)
    if trouble:
        say(f"  ended early: {trouble}", err=True)
    if found and not write_readings(environment.user_cache_dir() / FILE_NAME, facts, found):
        say("  these cannot be kept: they will be measured again", err=True)
    others = tuple(row for row in facts.readings if row.disk != disk or not found)
    return dataclasses.replace(facts, readings=(*others, *found))


def _rate(gib_per_second: float) -> str:
    return f"{gib_per_second:.2f} GiB/s" if gib_per_second else "not reached"


def measure_kernels(
    loaded: Loaded,
    facts: Facts,
    plan: Plan,
    kinds: Sequence[str],
    unsettled: set[tuple[str, str, str]],
) -> Facts:
    """The facts with a verdict for every kernel of those kinds at the plan's shape; kept on disk as well.

    `unsettled` collects the keys of kernels of which nothing could be said; those in it are not tried again.
    """
    import dataclasses

    from trainer.cli.jobs import child_environment
    from trainer.config import environment
    from trainer.engine.probing import probe
    from trainer.machine.verdicts import FILE_NAME, merged, untyped, write_verdicts
    from trainer.planning.planning import run_attention

    shape = run_attention(loaded, plan.micro_batch_size)
    candidates = probe.kernels_for(facts, plan.device, plan.dtype)
    wanted = [name for name in candidates if name.partition(".")[0] in kinds]
    missing = [
        name
        for name in probe.unmeasured(wanted, facts, shape, plan.dtype)
        if probe.verdict_key(name, shape, plan.dtype) not in unsettled
    ]
    if not missing:
        return facts
    path = environment.user_cache_dir() / FILE_NAME
    if untyped(path, facts):
        say(f"{path}: kernels of an earlier version, whose type is not known, are forgotten", err=True)
    at = f"{shape_class(shape)} {plan.dtype}"
    say(f"measuring kernels once for {at}: {', '.join(missing)}", err=True)
    found = probe.probe(missing, shape, plan.dtype, child_environment(plan, facts), device=plan.device)
    unsettled.update((row.kernel, row.shape_class, row.dtype) for row in found.unsettled)
    _tell(found)
    if not write_verdicts(path, facts, found.verdicts):
        say(f"  {path} cannot be written: they will be measured again", err=True)
    return dataclasses.replace(facts, verdicts=merged(facts.verdicts, found.verdicts))


def _tell(found: Probed) -> None:
    """What was measured, a line a kernel."""
    from trainer.engine.probing.probe import MOST_HELD

    for row in found.verdicts:
        speed = f"{row.milliseconds:.2f} ms" if row.milliseconds is not None else "-"
        say(f"  {row.kernel}: {'works' if row.works else 'fails'}, {speed}, {row.reason}", err=True)
    for row in found.unsettled:
        say(f"  {row.kernel}: not measured, and tried again at the next start: {row.reason}", err=True)
    if found.held >= MOST_HELD:
        say(
            f"  warning: other processes held {found.held:.0%} of the GPU's memory meanwhile; if they"
            " computed too, these times are wrong: `trainer probe CONFIG` measures again",
            err=True,
        )


def _without_failed(facts: Facts) -> Facts:
    import dataclasses

    return dataclasses.replace(facts, verdicts=tuple(row for row in facts.verdicts if row.works))
