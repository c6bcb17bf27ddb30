"""Floor 2: where hardware decisions are made: a pure function from facts and wishes to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from trainer.config.schema import RunConfig
from trainer.errors import HardwareError, Problem
from trainer.hardware import choices, compatibility, fit, memory
from trainer.hardware.choices import Situation
from trainer.hardware.facts import Facts
from trainer.hardware.geometry import Geometry
from trainer.hardware.nearest import nearest_fit
from trainer.hardware.plan import Decision, Plan
from trainer.hardware.profiles import Profile

# beyond this a container on unified memory was given a share of the host's, not a limit
_MOST_SHM_BYTES = 16 * memory.GIB
GeometryOf = Callable[[RunConfig, str], Geometry]
"""Geometry of a changed configuration in a compute type, for suggestions."""


def resolve(
    config: RunConfig,
    facts: Facts,
    profile: Profile,
    geometry: Geometry,
    sources: Mapping[str, str],
    *,
    profile_row: Decision | None = None,
    geometry_of: GeometryOf | None = None,
) -> Plan:
    """Every decision of a run with its reason.

    What the user wrote is honoured or refused; only `auto` changes. `geometry` is that of the compute type
    that `dtype_of` gives. Raises HardwareError where torch, driver or memory do not suffice, with the
    nearest configuration that fits where `geometry_of` can size others.
    """
    situation = Situation(config=config, facts=facts, profile=profile, sources=sources)
    machine_rows = compatibility.check(facts, profile)
    try:
        return _decide(situation, geometry, (*([profile_row] if profile_row else []), *machine_rows))
    except fit.DoesNotFitError as error:
        if geometry_of is None:
            raise
        sized = geometry_of

        def peak_of(changed: RunConfig) -> str:
            other = Situation(config=changed, facts=facts, profile=profile, sources=sources)
            return fit.gib(_decide(other, sized(changed, choices.dtype(other).value), ()).peak_bytes)

        raise HardwareError(
            [
                Problem(what=problem.what, where=problem.where, remedy=nearest_fit(config, peak_of))
                for problem in error.problems
            ]
        ) from None


def dtype_of(config: RunConfig, facts: Facts, profile: Profile, sources: Mapping[str, str]) -> str:
    """Compute type of the run, `bf16` or `fp32`; what geometry depends on. Raises as `resolve` does."""
    compatibility.check(facts, profile)
    return choices.dtype(Situation(config=config, facts=facts, profile=profile, sources=sources)).value


def _decide(situation: Situation, geometry: Geometry, machine_rows: tuple[Decision, ...]) -> Plan:
    profile, config = situation.profile, situation.config
    dtype, tf32 = choices.dtype(situation), choices.tf32(situation)
    attention = choices.attention(situation, dtype.value, geometry.attention_shape_class)
    limit = fit.budget(situation)
    chosen, skipped = fit.choose(situation, dtype.value, geometry, limit)
    optimizer = _optimizer(config.method, dtype.value)
    checkpoints, disk = _disk(config, chosen, geometry)
    rows = (
        *machine_rows,
        _row("memory_budget", fit.gib(limit.bytes), f"profile {profile.name}", limit.reason),
        dtype,
        *fit.decisions(situation, chosen, skipped),
        attention,
        tf32,
        optimizer,
        *_policies(profile),
        _row("caching", fit.gib(memory.total(chosen.cache)), "auto", chosen.cache_note),
        _row("disk", fit.gib(disk), "auto", f"{checkpoints} in output_dir, and the final files"),
        _row(
            "sizes",
            _parameters(geometry),
            "facts",
            "; ".join(sorted({c.source for c in geometry.components})),
        ),
    )
    return Plan(
        profile=profile.name,
        device=profile.device,
        dtype=dtype.value,
        weights=chosen.storage.weights,
        attention=attention.value,
        activation_checkpointing=chosen.storage.checkpointing,
        vae_tiling=chosen.storage.tiling,
        tf32=tf32.value == "on",
        pin_memory=profile.pin_memory,
        optimizer=optimizer.value,
        environment=profile.environment,
        train_memory=chosen.train,
        cache_memory=chosen.cache,
        budget_bytes=limit.bytes,
        disk_bytes=disk,
        decisions=rows,
        warnings=tuple(_warnings(situation)),
    )


def _optimizer(method: str, dtype: str) -> Decision:
    if method == "full" and dtype == "bf16":
        reason = "compensated (Kahan) sums: plain bf16 loses small updates"
        return _row("optimizer", "adamw_kahan_bf16", "auto", reason)
    reason = "fp32 throughout" if dtype == "fp32" else "fp32 masters of the bf16 adapter"
    return _row("optimizer", "adamw_fused_fp32", "auto", reason)


def _disk(config: RunConfig, chosen: fit.Outcome, geometry: Geometry) -> tuple[str, int]:
    """Scheduled checkpoints that exist at one time, in words, and the bytes of everything."""
    scheduled = config.train.max_train_steps // config.checkpoint.checkpointing_steps
    count = min(config.checkpoint.checkpoints_total_limit + 1, scheduled)
    size = memory.disk_bytes(chosen.storage, geometry, checkpoints=count)
    return f"{count} checkpoint{'s' if count != 1 else ''}", size


def _policies(profile: Profile) -> Iterator[Decision]:
    """What the profile fixes: pinning, its notes, the allocator's settings."""
    source, notes = f"profile {profile.name}", dict(profile.notes)
    pinned = "faster copies to the GPU" if profile.pin_memory else "there is no GPU to copy to"
    yield _row("pin_memory", choices.on_off(profile.pin_memory), source, notes.pop("pin_memory", pinned))
    for feature, reason in notes.items():
        yield _row(feature, "off" if feature == "offload" else "on", source, reason)
    for name, value in profile.environment.items():
        yield _row("environment", name, source, f"{value}, set before the training process starts")


def _warnings(situation: Situation) -> Iterator[str]:
    """What works, but deserves to be known."""
    facts, profile = situation.facts, situation.profile
    if facts.wsl and situation.on_gpu:
        yield (
            "WSL: when GPU memory runs out, the driver moves it to host memory silently and training turns"
            " very slow; leave some free"
        )
    if len(facts.gpus) > 1 and situation.on_gpu:
        yield f"{len(facts.gpus)} GPUs are visible, one process trains on the first ({facts.gpus[0].name})"
    if situation.on_gpu and facts.gpus[0].integrated and facts.shm_bytes > _MOST_SHM_BYTES:
        size = fit.gib(facts.shm_bytes)
        yield f"/dev/shm may grow to {size} and comes out of the same memory: limit it to 2-8 GiB"
    if profile.device == "cpu" and facts.gpus:
        yield f"{facts.gpus[0].name} is not used: TRAINER_PROFILE is cpu"


def _parameters(geometry: Geometry) -> str:
    """The trained component's size."""
    count = memory.parameters(geometry, "trained")
    return f"{count / 1e9:.1f} B parameters" if count >= 10**8 else f"{count / 1e6:.2f} M parameters"


def _row(feature: str, value: str, source: str, reason: str) -> Decision:
    return Decision(feature=feature, value=value, source=source, reason=reason)
