"""The plan of a configuration on a machine. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import families
from trainer.config import environment
from trainer.config.reading.load import Loaded, with_settings
from trainer.config.schema import FeaturesSection, RunConfig, changed
from trainer.errors import HardwareError, TrainerError
from trainer.families.family import Family
from trainer.families.values import AttentionShape
from trainer.files.weight_files import weight_files
from trainer.machine.facts import Facts, Gpu
from trainer.machine.profiles import Selected, select_each
from trainer.machine.reading import read_facts
from trainer.modeling.base.base import is_repository, local_folder
from trainer.modeling.base.source import prepare
from trainer.planning.base_check import base_rows, check_base
from trainer.planning.choose.block_homes import NO_OFFLOAD
from trainer.planning.choose.loading import disk_of
from trainer.planning.choose.situation import GeometryOf, Situation
from trainer.planning.plan import Decision, Plan
from trainer.planning.resolve import resolve
from trainer.planning.rules import judge
from trainer.planning.shapes.geometry import Geometry
from trainer.planning.shapes.run_shapes import component_base, component_config, run_geometry, run_shape
from trainer.planning.shapes.set_look import seen, shapes_of
from trainer.planning.torch_and_driver import require_memory_kind
from trainer.words.sizes import gib


def predict(config: RunConfig, facts: Facts, requested_profile: str = "auto") -> Plan:
    """Plan of a run on a machine: the function to call from Python. No torch, a few ms a call;
    batches above one are planned with the sizes of some pictures, which are read once.

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
    told = check_base(family, loaded, folder) if folder is not None else ()
    kinds = _kinds(facts, requested_profile, unified)
    free, in_use = _free_ones(kinds, facts, config)

    def changed_by(values: Mapping[str, Any]) -> RunConfig:
        changed = with_settings(loaded, values)
        judge(family, changed)
        return changed.config

    source = "facts" if requested_profile == "auto" else "TRAINER_PROFILE"
    common = Situation(
        config=config,
        facts=facts,
        profile=free[0].profile,
        sources=loaded.sources,
        sized=_geometries(family, loaded, folder, caption_tokens),
        environ=environment.snapshot(),
        disk=disk_of(weights_folder(family, folder)),
        goes_on=loaded.goes_on,
    )
    machines = [
        (_on(common, kind, in_use), Decision("profile", kind.profile.name, source, kind.reason))
        for kind in free
    ]
    plan = resolve(machines, changed_by, offload=not no_offload)
    rows = base_rows(family, config, folder) if is_repository(config) else ()
    warnings = (*plan.warnings, *told, *short_of_memory(plan, facts))
    return dataclasses.replace(plan, decisions=(*plan.decisions, *rows), warnings=warnings)


def short_of_memory(plan: Plan, facts: Facts, *, share: float = 1.0) -> tuple[str, ...]:
    """A sentence for each GPU of the plan with less free memory than this share of what the plan needs."""
    if plan.device != "cuda" or facts.wsl:  # Windows makes room
        return ()
    needed, told = plan.peak_bytes, list[str]()
    for place in plan.devices:
        free, total = facts.gpus[place].free_memory_bytes, facts.gpus[place].total_memory_bytes
        if free is not None and free < share * needed:
            have = f"GPU {place} has {gib(free)} of its {gib(total)} free"
            told.append(f"{have}, and the run needs {gib(needed)}: another program uses it")
    return tuple(told)


def _free_ones(
    kinds: Sequence[Selected], facts: Facts, config: RunConfig
) -> tuple[Sequence[Selected], tuple[tuple[int, Gpu], ...]]:
    """The kinds without the GPUs that others work on, and these with their places.

    Where no GPU is free, and where the number of GPUs was written, all may be taken, the free ones first.
    """
    used = {place for place, gpu in enumerate(facts.gpus) if gpu.in_use}
    rest = [_at(kind, facts, [place for place in kind.places if place not in used]) for kind in kinds]
    if config.parallel.gpus == "auto" and (left := [one for one in rest if one.places]):
        return left, tuple((place, facts.gpus[place]) for place in sorted(used))
    return [_at(kind, facts, sorted(kind.places, key=used.__contains__)) for kind in kinds], ()


def _at(kind: Selected, facts: Facts, places: Sequence[int]) -> Selected:
    """The kind with these of its GPUs, in this order."""
    if tuple(places) == kind.places:
        return kind
    return dataclasses.replace(kind, facts=facts.on(places), places=tuple(places))


def _on(situation: Situation, kind: Selected, in_use: tuple[tuple[int, Gpu], ...]) -> Situation:
    """The situation with the GPUs of one kind of those in its facts."""
    used = tuple(place for place, _ in in_use)
    return dataclasses.replace(
        situation,
        facts=kind.facts,
        profile=kind.profile,
        devices=kind.places,
        others=situation.facts.besides((*kind.places, *used)) if kind.places else (),
        in_use=in_use if kind.places else (),
    )


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
    # of single samples it does not matter what shapes they have
    looks = caption_tokens is None and loaded.config.train.train_batch_size > 1
    looked = seen(loaded.config.data.sets, family) if looks else ()

    def geometry_of(changed: RunConfig, dtype: str) -> Geometry:
        return run_geometry(
            family,
            changed,
            model_folder=folder,
            dtype=dtype,
            sources=loaded.sources,
            downloads=downloads,
            caption_tokens=caption_tokens,
            pictures=shapes_of(looked, changed.data.resolution, family.pixel_multiple),
        )

    return geometry_of


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


def may_be_planned(config: RunConfig, values: Mapping[str, Any], facts: Facts | None = None) -> bool:
    """True if the run loads with other values by dotted key and has a plan on this machine.

    Asked from the run itself: memory counts as available, which the run's own end will make so.
    """
    standard = FeaturesSection()
    written = [name for name, value in vars(config.features).items() if value != vars(standard)[name]]
    sources = dict.fromkeys((f"features.{name}" for name in written), "the run's configuration")
    try:
        facts = facts or machine_facts()
        memory = dataclasses.replace(facts.memory, available_bytes=facts.memory.total_bytes)
        gpus = tuple(dataclasses.replace(gpu, free_memory_bytes=None) for gpu in facts.gpus)
        changed = with_settings(Loaded(config=config, sources=sources), values)
        plan_run(changed, dataclasses.replace(facts, memory=memory, gpus=gpus), requested_profile())
    except TrainerError:
        return False
    return True


def machine_facts(facts_file: Path | None = None) -> Facts:
    """Facts of this machine, or of `facts_file`, or of the file that TRAINER_FACTS names."""
    recorded = environment.read("TRAINER_FACTS")
    torch_facts = environment.read("TRAINER_TORCH_FACTS")
    return read_facts(
        cache_dir=environment.user_cache_dir(),
        facts_file=facts_file or (Path(recorded) if recorded else None),
        named_by="--facts" if facts_file else "TRAINER_FACTS",
        torch_facts=Path(torch_facts) if torch_facts else None,
        environ=environment.snapshot(),
    )


def requested_profile() -> str:
    """TRAINER_PROFILE, or `auto`."""
    return environment.read("TRAINER_PROFILE") or "auto"


def run_attention(loaded: Loaded, batch_size: int) -> AttentionShape:
    """The run's attention call in a micro-batch of that size, for the kernel probe."""
    config = changed(loaded.config, {"train.train_batch_size": batch_size})
    family = families.get(config.family)
    name = family.trained_component
    base = component_base(local_folder(config), name, downloads=is_repository(config))
    # which kernel runs depends on heads, width and tokens, not on the bytes of a value
    shape = run_shape(config, family, bytes_per_value=2)
    return family.attention_shape(component_config(family, base, name), shape)
