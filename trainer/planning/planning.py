"""The plan of a configuration on a machine. Imports no torch."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from trainer import families
from trainer.config import environment
from trainer.config.hosts import ONE, Hosts
from trainer.config.reading.load import Loaded, with_settings
from trainer.config.schema import FeaturesSection, RunConfig, changed
from trainer.data.sets.held_out import held_out_sets
from trainer.errors import ConfigError, HardwareError, TrainerError
from trainer.families.family import Family
from trainer.families.values import AttentionShape
from trainer.files.weight_files import weight_files
from trainer.machine import network
from trainer.machine.facts import Facts, Gpu
from trainer.machine.profiles import Selected, select_each
from trainer.machine.reading import read_facts
from trainer.modeling.base.base import is_repository, local_folder
from trainer.modeling.base.source import prepare
from trainer.planning.base_check import base_rows, check_base
from trainer.planning.choose.loading import disk_of
from trainer.planning.choose.situation import GeometryOf, Situation
from trainer.planning.choose.swap_and_shard import NO_OFFLOAD
from trainer.planning.kept_decisions import continued
from trainer.planning.plan import Decision, Plan
from trainer.planning.resolve import resolve
from trainer.planning.rules import judge, require_shift, without_effect
from trainer.planning.shapes.geometry import Geometry
from trainer.planning.shapes.run_shapes import (
    CONFIGS,
    component_base,
    component_config,
    run_geometry,
    run_shape,
)
from trainer.planning.shapes.set_look import Seen, alike, seen, shapes_of
from trainer.planning.torch_and_driver import require_memory_kind
from trainer.words.sizes import gib

NEEDED = 0.9
"""Share of the predicted memory without which a run cannot succeed: predictions are rather high."""


def predict(config: RunConfig, facts: Facts, requested_profile: str = "auto") -> Plan:
    """Plan of a run on a machine: the function to call from Python. No torch, a few ms a call;
    batches above one, and control images, are planned with the sizes of some pictures, which are read once.

    `plan.train_memory`, `plan.cache_memory` and `plan.host_memory` are bytes by component,
    `plan.step_milliseconds` is the predicted time of `plan.micro_batch_size` samples, and every choice that
    `config` leaves `auto` is made, with its reason in `plan.decisions`. `facts` come from `machine_facts()`,
    or from a recorded machine by `trainer.machine.reading.read_recorded`. Raises as `plan_run`.
    """
    return plan_run(Loaded(config=config, sources={}), facts, requested_profile)


def plan_run(
    loaded: Loaded,
    facts: Facts,
    requested_profile: str = "auto",
    *,
    find_model: Callable[[RunConfig], Path | None] | None = None,
    caption_tokens: int | None = None,
) -> Plan:
    """The plan of a run on the machine that `facts` describe.

    `find_model` says where the base model is on this disk; `local_folder` if not given. With
    `caption_tokens` all samples are of one shape, with captions so long; else they are of the shapes that a
    look at the data set shows. Raises ConfigError (78) for a configuration that contradicts itself or its
    family, for a profile that does not exist and for an adapter on layers that the model has none of,
    HardwareError (69) where the machine cannot do it, AccessError (77) where the base model is a folder that
    is not there. UNIFIED_MEMORY, DISABLE_CPU_OFFLOAD and PYTORCH_ALLOC_CONF are obeyed.
    """
    unified, no_offload = environment.switch("UNIFIED_MEMORY"), environment.switch(NO_OFFLOAD)
    config, family = loaded.config, families.get(loaded.config.family)
    judge(family, loaded)
    folder = (find_model or local_folder)(config)
    told = _told(family, loaded, folder)
    kinds = _kinds(facts, requested_profile, unified)

    def changed_by(values: Mapping[str, Any]) -> RunConfig:
        changed = with_settings(loaded, values)
        judge(family, changed)
        return changed.config

    hosts, source = loaded.hosts, "facts" if requested_profile == "auto" else "TRAINER_PROFILE"
    common = Situation(
        config=config,
        facts=facts,
        profile=kinds[0].profile,
        sources=loaded.sources,
        sized=_geometries(family, loaded, folder, caption_tokens),
        environ=environment.snapshot(),
        disk=disk_of(weights_folder(family, folder)),
        goes_on=loaded.goes_on,
        hosts=hosts,
        interface=_interface(hosts) if hosts.several else "",
    )

    def resolved(left_out: Set[int]) -> Plan:
        return resolve(_situations(common, kinds, left_out, source), changed_by, offload=not no_offload)

    plan = _beside_others(resolved, kinds, facts) if config.parallel.gpus == "auto" else resolved(frozenset())
    rows = base_rows(family, config, folder) if is_repository(config) else ()
    warnings = (*plan.warnings, *told, *short_of_memory(plan, facts))
    return dataclasses.replace(plan, decisions=(*plan.decisions, *rows), warnings=warnings)


def _told(family: Family, loaded: Loaded, folder: Path | None) -> tuple[str, ...]:
    """Warnings about the base model, as far as it is here, and about keys without effect; raises as
    `check_base`.
    """
    of_base = check_base(family, loaded, folder) if folder is not None else ()
    known = folder or CONFIGS / family.name
    require_shift(family, loaded, known)
    return (
        *of_base,
        *_of_another_base(family, loaded.config, folder),
        *without_effect(family, loaded, known),
    )


def _of_another_base(family: Family, config: RunConfig, folder: Path | None) -> Iterator[str]:
    """A warning where nothing is here of a base that is not the one whose sizes are committed."""
    key = "pretrained_model_name_or_path"
    ours, named = family.defaults["model"][key], vars(config.model)[key]
    if folder is None and named != ours:
        yield (
            f"nothing of {named} is here yet: sizes, memory, download and time are those of {ours}; its own"
            " are known once its configuration is here, which `trainer train` gets before it plans"
        )


def _interface(hosts: Hosts) -> str:
    """The network interface by which this host reaches the others; empty where it is not known now."""
    try:
        return network.interface_to(network.address_of(hosts.address, hosts.port), hosts.port)
    except OSError:  # a start waits for the name before it plans, and says so
        return ""


def short_of_memory(plan: Plan, facts: Facts, *, share: float = 1.0) -> tuple[str, ...]:
    """A sentence for each GPU of the plan with less free memory than this share of what the plan needs."""
    told, needed = list[str](), gib(plan.peak_bytes)
    for place in _short(plan, facts, share):
        gpu = facts.gpus[place]
        have = f"GPU {place} has {gib(_free(gpu))} of its {gib(gpu.total_memory_bytes)} free"
        told.append(f"{have}, and the run needs {needed}: another program uses it")
    return tuple(told)


def _short(plan: Plan, facts: Facts, share: float) -> list[int]:
    """Places of the plan's GPUs with less free memory than this share of what it needs."""
    if plan.device != "cuda" or facts.wsl:  # Windows makes room
        return []
    found = list[int]()
    for place in plan.devices:
        free = facts.gpus[place].free_memory_bytes
        if free is not None and free < share * plan.peak_bytes:
            found.append(place)
    return found


def _beside_others(resolved: Callable[[Set[int]], Plan], kinds: Sequence[Selected], facts: Facts) -> Plan:
    """The plan for GPUs on which no other program works, where such are as good and the run fits them; else
    for those that have the memory it needs.
    """
    places = {place for kind in kinds for place in kind.places}
    in_use = {place for place in places if facts.gpus[place].in_use}
    most = max((_free(facts.gpus[place]) for place in places - in_use), default=-1)
    left_out: Set[int] = {place for place in in_use if _free(facts.gpus[place]) <= most}
    try:
        plan = resolved(left_out)
    except (HardwareError, ConfigError):
        if not left_out:
            raise
        left_out = frozenset()
        plan = resolved(left_out)
    while (short := set(_short(plan, facts, NEEDED))) and places - left_out - short:
        left_out = left_out | short
        try:
            plan = resolved(left_out)
        except (HardwareError, ConfigError):  # the rest does not do: `short_of_memory` tells of these
            return plan
    return plan


def _free(gpu: Gpu) -> int:
    """Bytes that nobody uses, as far as is known."""
    return gpu.total_memory_bytes if gpu.free_memory_bytes is None else gpu.free_memory_bytes


def _without(kinds: Sequence[Selected], facts: Facts, left_out: Set[int]) -> list[Selected]:
    """The kinds without some GPUs; of each the free ones first, then those that have the most memory left."""

    def order(place: int) -> int:
        return -_free(facts.gpus[place]) if facts.gpus[place].in_use else -sys.maxsize

    found = list[Selected]()
    for kind in kinds:
        places = tuple(sorted((one for one in kind.places if one not in left_out), key=order))
        if places == kind.places:
            found.append(kind)
        elif places:
            found.append(dataclasses.replace(kind, facts=facts.on(places), places=places))
    return found


def _situations(
    common: Situation, kinds: Sequence[Selected], left_out: Set[int], source: str
) -> list[tuple[Situation, Decision]]:
    """The situation on the GPUs of each kind without some, with the row of its profile."""
    facts, found = common.facts, list[tuple[Situation, Decision]]()
    for kind in _without(kinds, facts, left_out):
        situation = dataclasses.replace(
            common,
            facts=kind.facts,
            profile=kind.profile,
            devices=kind.places,
            others=facts.besides((*kind.places, *left_out)) if kind.places else (),
            in_use=tuple((place, facts.gpus[place]) for place in sorted(left_out)),
        )
        found.append((situation, Decision("profile", kind.profile.name, source, kind.reason)))
    return found


def _kinds(facts: Facts, requested_profile: str, unified: bool | None) -> list[Selected]:
    """Each kind of GPU that a run may take, with its profile.

    Raises as `select_each`, and HardwareError where UNIFIED_MEMORY excludes all of them.
    """
    found, refused = list[Selected](), list[HardwareError]()
    for one in select_each(facts, requested_profile):
        try:
            require_memory_kind(one.facts, one.profile, unified)
        except HardwareError as error:
            refused.append(error)
            continue
        found.append(one)
    if not found:
        raise refused[0]
    return found


def _geometries(
    family: Family, loaded: Loaded, folder: Path | None, caption_tokens: int | None
) -> GeometryOf:
    """The geometry of the run, changed, in a compute type."""
    downloads = is_repository(loaded.config)
    # of single samples it does not matter what shapes they have, but for control images
    several = caption_tokens is None and loaded.config.train.train_batch_size > 1
    looked = _looked(family, loaded.config) if several or family.control_counts[1] else ()
    share = alike(looked) if caption_tokens is None else 1.0
    pictures = looked if several else ()

    def geometry_of(changed: RunConfig, dtype: str) -> Geometry:
        return run_geometry(
            family,
            changed,
            model_folder=folder,
            dtype=dtype,
            sources=loaded.sources,
            downloads=downloads,
            caption_tokens=caption_tokens,
            pictures=shapes_of(pictures, changed.data.resolution, family.pixel_multiple),
            alike=share,
        )

    return geometry_of


def _looked(family: Family, config: RunConfig) -> tuple[Seen, ...]:
    """Some samples of each set, with the sizes of their pictures."""
    return seen(config.data.sets, family, beside=held_out_sets(config.validation))


def weights_folder(family: Family, folder: Path | None) -> Path | None:
    """Real folder of the trained component's weight files, which are links in the hub's cache; or None."""
    files = () if folder is None else weight_files(folder / family.trained_component).files
    return files[0].resolve().parent if files else None


def prepare_base(loaded: Loaded) -> None:
    """Put the files of the base model on this disk that a job's plan needs, before the job is planned.

    Raises AccessError where the base cannot be made complete or is damaged, ConfigError where it is another
    family's. Says no word to the hub where it is complete.
    """
    family, folder = families.get(loaded.config.family), local_folder(loaded.config)
    if folder is not None:
        check_base(family, loaded, folder)
    prepare(loaded.config, families.components(family), trained=family.trained_component)


def may_be_planned(
    config: RunConfig, values: Mapping[str, Any], facts: Facts | None = None, *, hosts: Hosts = ONE
) -> bool:
    """True if the run loads with other values by dotted key and has a plan on this machine, or on as many
    `hosts`, as its next start would make it: with what it keeps of a first one.

    Asked from the run itself: memory counts as available, which the run's own end will make so.
    """
    standard = FeaturesSection()
    written = [name for name, value in vars(config.features).items() if value != vars(standard)[name]]
    sources = dict.fromkeys((f"features.{name}" for name in written), "the run's configuration")
    try:
        facts = facts or machine_facts()
        asked = with_settings(Loaded(config=config, sources=sources, hosts=hosts), values)
        changed = continued(asked)
        alone = dataclasses.replace(facts.idle(), memory=facts.memory.idle())
        plan_run(changed, alone, requested_profile())
    except TrainerError:
        return False
    return True


def machine_facts(facts_file: Path | None = None, *, starts: bool = True) -> Facts:
    """Facts of this machine, or of `facts_file`, or of the file that TRAINER_FACTS names.

    Without `starts` no process is started to ask torch for its architectures.
    """
    recorded = environment.read("TRAINER_FACTS")
    torch_facts = environment.read("TRAINER_TORCH_FACTS")
    return read_facts(
        cache_dir=environment.user_cache_dir(),
        facts_file=facts_file or (Path(recorded) if recorded else None),
        named_by="--facts" if facts_file else "TRAINER_FACTS",
        torch_facts=Path(torch_facts) if torch_facts else None,
        environ=environment.snapshot(),
        starts=starts,
    )


def requested_profile() -> str:
    """TRAINER_PROFILE, or `auto`."""
    return environment.read("TRAINER_PROFILE") or "auto"


def run_attention(loaded: Loaded, batch_size: int) -> AttentionShape:
    """The run's attention call in a micro-batch of that size, for the kernel probe."""
    config = changed(loaded.config, {"train.train_batch_size": batch_size})
    family = families.get(config.family)
    name = family.trained_component
    folder = local_folder(config)
    base = component_base(folder, name, downloads=is_repository(config))
    share = alike(_looked(family, config)) if family.control_counts[1] else None
    # which kernel runs depends on heads, width and tokens, not on the bytes of a value
    shape = run_shape(config, family, bytes_per_value=2, model_folder=folder, alike=share)
    return family.attention_shape(component_config(family, base, name), shape)
