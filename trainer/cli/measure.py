"""The plan of a run on this machine, with kernels measured where verdicts are missing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from trainer import families
from trainer.cli.jobs import FREED_SECONDS, LOOK_SECONDS, child_environment, plain_environment
from trainer.cli.output import say
from trainer.config import environment
from trainer.config.reading.load import Loaded
from trainer.config.tree import placing
from trainer.engine.probing import probe as probing
from trainer.engine.probing import reading
from trainer.engine.probing.link import probe_link
from trainer.files.weight_files import weight_files
from trainer.machine.facts import Facts
from trainer.machine.host import digest_of_visible
from trainer.machine.verdicts import FILE_NAME, keep, merged, named, untyped
from trainer.modeling.base.base import local_folder
from trainer.planning import planning
from trainer.planning.choose import loading
from trainer.planning.choose.fastest_fit import DoesNotFitError
from trainer.planning.choose.situation import KernelsFailedError
from trainer.planning.choose.swap_and_shard import NO_PEER_ACCESS
from trainer.planning.plan import Plan
from trainer.planning.shapes.shape_classes import shape_class
from trainer.words.sizes import gib

KINDS = ("attention", "matmul")
"""First parts of kernels' names."""
_MOST_PROBES = 3
"""Rounds of measuring: with new verdicts a step may be split into other micro-batches, and kernels then have
other shapes."""


def _nothing(plan: Plan) -> None:
    """Looks at nothing before kernels are measured."""


def planned(loaded: Loaded, *, probe: bool, first: Callable[[Plan], None] = _nothing) -> tuple[Facts, Plan]:
    """This machine's facts and the run's plan; with `probe`, kernels without a verdict are measured first.

    `first` is given the plan before anything is measured on its GPUs, and may raise. A run that kept verdicts
    alone would refuse is measured anew before it is refused. Errors say where the keys that they name were
    written.
    """
    with placing(loaded.sources):
        return _planned(loaded, probe=probe, first=first)


def _planned(loaded: Loaded, *, probe: bool, first: Callable[[Plan], None]) -> tuple[Facts, Plan]:
    planning.prepare_base(loaded)
    facts, profile = planning.machine_facts(), planning.requested_profile()
    if probe:
        facts = measure_links(loaded, facts)
    features = loaded.config.features
    asked = {"attention": features.attention, "matmul": features.compute}
    kinds = tuple(kind for kind, value in asked.items() if value == "auto")
    try:
        plan = planning.plan_run(loaded, facts, profile)
    except KernelsFailedError as error:
        if not probe:
            raise
        say(f"{error.problems[0].what}: measured again", err=True)
        working = tuple(row for row in facts.verdicts if row.works)
        facts, kinds = dataclasses.replace(facts, verdicts=working), KINDS
        plan = planning.plan_run(loaded, facts, profile)
    if not (probe and plan.device == "cuda"):
        return facts, plan
    first(plan)
    if features.loader == "auto":
        facts = measure_reading(loaded, facts, plan)
        plan = planning.plan_run(loaded, facts, profile)
    return _settled(loaded, facts, plan, kinds, failed_told=False)


def planned_in_free_memory(
    loaded: Loaded, *, probe: bool, first: Callable[[Plan], None] = _nothing
) -> tuple[Facts, Plan]:
    """`planned`, which is tried again for a moment where other programs have the host memory that it lacks:
    one may be at its end.
    """
    end, told = time.monotonic() + FREED_SECONDS, False
    while True:
        try:
            return planned(loaded, probe=probe, first=first)
        except DoesNotFitError as error:
            if not error.taken_bytes or time.monotonic() >= end:
                raise
            if not told:
                what = f"{error.problems[0].what}; other programs have {gib(error.taken_bytes)} of the host's"
                say(f"{what}: waiting {FREED_SECONDS:.0f} s for it", err=True)
                told = True
        time.sleep(LOOK_SECONDS)


def measured_anew(loaded: Loaded, facts: Facts) -> Facts:
    """The facts with every kernel measured at the run's shape, whatever was kept.

    Kept verdicts have no part in the plan that gives the shape, so that none of them can prevent this.
    """
    facts = measure_links(loaded, facts, anew=True)
    fresh = dataclasses.replace(facts, verdicts=())
    plan = planning.plan_run(loaded, fresh, planning.requested_profile())
    fresh, plan = _settled(loaded, fresh, plan, KINDS, failed_told=True)
    if plan.device == "cuda":
        facts = measure_reading(loaded, facts, plan, anew=True)
    return dataclasses.replace(facts, verdicts=merged(facts.verdicts, fresh.verdicts))


def _settled(
    loaded: Loaded, facts: Facts, plan: Plan, kinds: Sequence[str], *, failed_told: bool
) -> tuple[Facts, Plan]:
    """Facts with a verdict for every kernel of those kinds at the shape of the plan that follows from them.

    Raises KernelsFailedError where no plan follows; with `failed_told` that is a warning, and ends it.
    """
    unsettled: set[tuple[str, str, str]] = set()
    for _ in range(_MOST_PROBES):
        measured = measure_kernels(loaded, facts, plan, kinds, unsettled)
        if measured == facts:
            break
        facts = measured
        try:
            plan = planning.plan_run(loaded, facts, planning.requested_profile())
        except KernelsFailedError as error:
            if not failed_told:
                raise
            say(f"warning: {error}", err=True)
            break
    return facts, plan


def measure_links(loaded: Loaded, facts: Facts, *, anew: bool = False) -> Facts:
    """The facts with the way between the GPUs of each kind that has several, which decides whether they may
    share a base; as they are where one GPU or none trains.

    Once for these GPUs, and with `anew` again. It needs no plan, because a plan may need it. GPUs on which
    other programs work are left alone, unless `anew` asks for those and there are no two others.
    """
    asked = loaded.config.parallel.gpus
    alone = asked == 1 or planning.requested_profile() == "cpu"
    if loaded.config.method == "full":  # of its plan the way decides nothing: it tells the time of a step
        alone = alone or asked == "auto" or loaded.hosts.several
    visible = digest_of_visible(environment.snapshot())
    for kind in () if alone or facts.torch is None or facts.torch.cuda is None else facts.kinds:
        places = tuple(place for place in kind if not facts.gpus[place].in_use)
        if len(places) < 2 and anew:
            places = kind
        here = facts.on(places or kind)
        # that more of them do not all read each other says nothing of these
        known = here.link is not None and (here.link.works or here.link.gpus == len(places))
        if len(places) < 2 or NO_PEER_ACCESS in here.gpu.name or (known and not anew):
            continue
        say(f"measuring once how {len(places)} {here.gpu.name} read each other's memory", err=True)
        settled, found = probe_link([f"cuda:{place}" for place in places], plain_environment(), visible)
        found = dataclasses.replace(found, places=places)
        figures = f"{found.gib_per_second:.0f} GiB/s, 64 MiB exchanged in {found.exchange_ms:.2f} ms"
        say(f"  {figures if found.works else 'fails'}: {found.reason}", err=True)
        if not settled:
            say("  this says nothing of the GPUs: tried again at the next start", err=True)
            continue
        if not keep(environment.user_cache_dir() / FILE_NAME, here, links=[found]):
            say("  this cannot be kept: it will be measured again", err=True)
        others = tuple(row for row in facts.links if row.places != places)
        facts = dataclasses.replace(facts, links=(*others, *named([found], facts, here)))
    return facts


def measure_reading(loaded: Loaded, facts: Facts, plan: Plan, *, anew: bool = False) -> Facts:
    """The facts with rates of both loaders on the disk of the run's base model, where they can be measured.

    Once for each disk, and with `anew` again, then also saying why not.
    """
    base, family = local_folder(loaded.config), families.get(loaded.config.family)
    disk, here = loading.disk_of(planning.weights_folder(family, base)), facts.on(plan.devices)
    if disk and not anew and any(row.disk == disk for row in here.readings):
        return facts
    file = reading.largest(weight_files(base / family.trained_component).files) if base and disk else None
    obstacle = loading.unmeasured(here, disk) or ("" if file else "its files are small")
    if obstacle or file is None:
        if anew:
            say(f"reading the base model is not measured: {obstacle}", err=True)
        return facts
    say(f"measuring once how {file.name} is read from {disk}", err=True)
    environ = child_environment(plan, facts)
    found, trouble = reading.probe_reading(file, disk, environ, device=plan.first_device)
    for row in found:
        rate = f"{row.gib_per_second:.2f} GiB/s" if row.gib_per_second else "not reached"
        say(f"  {row.loader}, {row.state}: {rate}", err=True)
    if trouble:
        say(f"  ended early: {trouble}", err=True)
    if found and not keep(environment.user_cache_dir() / FILE_NAME, here, readings=found):
        say("  these cannot be kept: they will be measured again", err=True)
    # rates of another kind of GPU stay
    others = tuple(row for row in facts.readings if row.disk != disk or row not in here.readings or not found)
    return dataclasses.replace(facts, readings=(*others, *named(found, facts, here)))


def measure_kernels(
    loaded: Loaded, facts: Facts, plan: Plan, kinds: Sequence[str], unsettled: set[tuple[str, str, str]]
) -> Facts:
    """The facts with a verdict for every kernel of those kinds at the plan's shape; kept on disk as well.

    `unsettled` collects the keys of kernels of which nothing could be said; those in it are not tried again.
    """
    shape, here = planning.run_attention(loaded, plan.micro_batch_size), facts.on(plan.devices)
    candidates = probing.kernels_for(here, plan.device, plan.dtype)
    wanted = [name for name in candidates if name.partition(".")[0] in kinds]
    missing = [
        name
        for name in probing.unmeasured(wanted, here, shape, plan.dtype)
        if probing.verdict_key(name, shape, plan.dtype) not in unsettled
    ]
    if not missing:
        return facts
    path = environment.user_cache_dir() / FILE_NAME
    if untyped(path, here):
        say(f"{path}: kernels of an earlier version, whose type is not known, are forgotten", err=True)
    at = f"{shape_class(shape)} {plan.dtype}"
    say(f"measuring kernels once for {at}: {', '.join(missing)}", err=True)
    environ = child_environment(plan, facts)
    found = probing.probe(missing, shape, plan.dtype, environ, device=plan.first_device)
    unsettled.update((row.kernel, row.shape_class, row.dtype) for row in found.unsettled)
    for row in found.verdicts:
        speed = f"{row.milliseconds:.2f} ms" if row.milliseconds is not None else "-"
        say(f"  {row.kernel}: {'works' if row.works else 'fails'}, {speed}, {row.reason}", err=True)
    for row in found.unsettled:
        say(f"  {row.kernel}: not measured, and tried again at the next start: {row.reason}", err=True)
    if found.held >= probing.MOST_HELD:
        say(
            f"  warning: other processes held {found.held:.0%} of the GPU's memory meanwhile; if they"
            " computed too, these times are wrong: `trainer probe CONFIG` measures again",
            err=True,
        )
    if not keep(path, here, verdicts=found.verdicts):
        say(f"  {path} cannot be written: they will be measured again", err=True)
    return dataclasses.replace(facts, verdicts=merged(facts.verdicts, named(found.verdicts, facts, here)))
