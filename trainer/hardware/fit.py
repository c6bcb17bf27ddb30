"""Floor 2: how a run is made to fit: storage of the base, activation checkpointing, tiling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.errors import HardwareError
from trainer.hardware import memory
from trainer.hardware.choices import Situation, on_off
from trainer.hardware.geometry import Geometry
from trainer.hardware.memory import GIB, QUANTIZED, Storage
from trainer.hardware.plan import Decision, MemoryRow

PACKAGES = {"int8": "optimum-quanto", "nf4": "bitsandbytes"}
"""What each quantised storage of the base needs."""
_INSTALL = {"int8": "pip install optimum-quanto", "nf4": "pip install 'trainer[nf4]'"}


class DoesNotFitError(HardwareError):
    """No combination that the user left open fits the budget."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Device memory that the run may fill, and where the figure comes from."""

    bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One combination with what it would need."""

    storage: Storage
    train: tuple[MemoryRow, ...]
    cache: tuple[MemoryRow, ...]
    """Rows of the larger stage of caching."""
    cache_note: str

    @property
    def peak_bytes(self) -> int:
        """The larger of training and caching."""
        return max(memory.total(self.train), memory.total(self.cache))

    def __str__(self) -> str:
        checkpointing = "with" if self.storage.checkpointing else "without"
        return f"{self.storage.weights} {checkpointing} activation checkpointing needs {gib(self.peak_bytes)}"


def budget(situation: Situation) -> Budget:
    """The profile's share of the device's memory, or less where that is the host's and others use it."""
    profile, host = situation.profile, situation.facts.memory
    total = situation.facts.gpus[0].total_memory_bytes if situation.on_gpu else host.total_bytes
    share = int(total * profile.budget_share)
    if profile.headroom_bytes is None:
        return Budget(bytes=share, reason=f"{profile.budget_share:.0%} of {gib(total)}")
    rest = max(0, host.available_bytes - profile.headroom_bytes)
    if rest < share:
        return Budget(
            bytes=rest,
            reason=f"{gib(host.available_bytes)} available now, less {gib(profile.headroom_bytes)} headroom",
        )
    return Budget(bytes=share, reason=f"{profile.budget_share:.0%} of {gib(total)}, the allocator's cap")


def choose(
    situation: Situation, dtype: str, geometry: Geometry, limit: Budget
) -> tuple[Outcome, list[Outcome]]:
    """The first combination that fits, and the better ones that do not.

    Raises DoesNotFitError with the smallest need where nothing fits.
    """
    weights, no_more = _weights(situation, dtype, geometry)
    skipped: list[Outcome] = []
    for storage in _candidates(situation, dtype, weights, stored=bool(geometry.stored_as)):
        outcome = evaluate(storage, geometry)
        if outcome.peak_bytes <= limit.bytes:
            return outcome, skipped
        skipped.append(outcome)
    least = min(skipped, key=lambda outcome: outcome.peak_bytes)
    phase = (
        "training"
        if memory.total(least.train) >= memory.total(least.cache)
        else "encoding captions and images"
    )
    hint = f"; {no_more}" if no_more else ""
    raise DoesNotFitError(
        f"the run does not fit: {phase} needs {gib(least.peak_bytes)} at least"
        f" ({least.storage.weights} weights, activation checkpointing {on_off(least.storage.checkpointing)}),"
        f" the budget is {gib(limit.bytes)} ({limit.reason}){hint}",
        where=f"plan for {situation.gpu}",
    )


def evaluate(storage: Storage, geometry: Geometry) -> Outcome:
    """What one combination needs."""
    stages = memory.cache_stages(storage, geometry)
    largest = max(stages.values(), key=memory.total)
    figures = ", then ".join(f"{name} {gib(memory.total(rows))}" for name, rows in stages.items())
    return Outcome(
        storage=storage,
        train=memory.train_rows(storage, geometry),
        cache=largest,
        cache_note=f"{figures}; each is freed before the next" if len(stages) > 1 else figures,
    )


def decisions(situation: Situation, chosen: Outcome, skipped: Sequence[Outcome]) -> tuple[Decision, ...]:
    """Rows for weights, activation checkpointing and tiling, with what was skipped and why."""
    features, storage, profile = situation.config.features, chosen.storage, situation.profile
    others = _distinct(skipped)
    fits = "the checkpoint is stored so" if storage.stored else f"fits: {gib(chosen.peak_bytes)}"
    larger = "; ".join(str(outcome) for outcome in others if outcome.storage.weights != storage.weights)
    stored = "; ".join(str(outcome) for outcome in others if outcome.storage.weights == storage.weights)
    rows = [_row(situation, "weights", storage.weights, features.weights, larger or fits)]
    if features.activation_checkpointing == "auto" and profile.prefer_checkpointing:
        source, reason = (
            f"profile {profile.name}",
            "memory here is shared with the host: the smaller peak is the safer",
        )
        rows.append(Decision(feature="activation_checkpointing", value="on", source=source, reason=reason))
    else:
        reason = stored if storage.checkpointing else "everything fits without, and the step is faster"
        value = on_off(storage.checkpointing)
        rows.append(
            _row(
                situation,
                "activation_checkpointing",
                value,
                features.activation_checkpointing,
                reason or fits,
            )
        )
    untiled = "images are encoded and decoded whole" if not storage.tiling else "the VAE does not fit untiled"
    rows.append(_row(situation, "vae_tiling", on_off(storage.tiling), features.vae_tiling, untiled))
    return tuple(rows)


def gib(count: int) -> str:
    """Bytes as GiB with one digit; small sizes as MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / 1024**2:.1f} MiB"


def _row(situation: Situation, feature: str, value: str, asked: str | bool, reason: str) -> Decision:
    if asked == "auto":
        return Decision(feature=feature, value=value, source="auto", reason=reason)
    return Decision(
        feature=feature, value=value, source=situation.source(f"features.{feature}"), reason="as written"
    )


def _weights(situation: Situation, dtype: str, geometry: Geometry) -> tuple[list[str], str]:
    """Storages to try in order, and why there are no smaller ones."""
    asked = situation.config.features.weights
    if geometry.stored_as:
        return [_stored(situation, geometry)], f"the checkpoint is stored in {geometry.stored_as}"
    if asked in QUANTIZED:
        _require_quantizable(situation, asked)
    if asked != "auto":
        return [asked], f"features.weights is {asked} ({situation.source('features.weights')})"
    if situation.config.method == "full":
        return [dtype], "int8 and nf4 are for method: lora only"
    missing = {kind: _missing(situation, kind) for kind in QUANTIZED}
    usable = [kind for kind in QUANTIZED if not missing[kind]]
    return [dtype, *usable], "; ".join(reason for reason in missing.values() if reason)


def _stored(situation: Situation, geometry: Geometry) -> str:
    """The storage of a checkpoint that is quantised already; only it or `auto` may be asked for."""
    asked, kind = situation.config.features.weights, geometry.stored_as
    component = next(part.name for part in geometry.components if part.role == "trained")
    folder = situation.config.model.pretrained_model_name_or_path
    config = "/".join(filter(None, (folder, component, "config.json")))
    if asked not in ("auto", kind):
        raise situation.refuse(
            "features.weights",
            f"{config} says that the weights are stored in {kind}, so they cannot be had in {asked}",
            "leave features.weights out, or use the model's full-precision files",
        )
    if situation.config.method == "full":
        raise situation.refuse(
            "method",
            f"{config} says that the weights are stored in {kind}, which cannot be trained",
            "use method: lora, or the model's full-precision files",
        )
    missing = _missing(situation, kind)
    if missing:
        raise situation.refuse("features.weights", f"{config}: {missing}", _INSTALL[kind])
    return kind


def _require_quantizable(situation: Situation, kind: str) -> None:
    if situation.config.method == "full":
        what = f"an {kind} base cannot be trained"
        raise situation.refuse("features.weights", what, "use method: lora, or bf16")
    missing = _missing(situation, kind)
    if missing:
        raise situation.refuse("features.weights", missing, _INSTALL[kind])


def _missing(situation: Situation, kind: str) -> str:
    """Why a quantised storage cannot be had on this machine; empty where it can."""
    package = PACKAGES[kind]
    return "" if package in situation.facts.packages else f"{kind} needs {package}, which is not installed"


def _candidates(
    situation: Situation, dtype: str, weights: Sequence[str], *, stored: bool
) -> Iterator[Storage]:
    """All combinations that were not excluded by the user, the fastest first."""
    config, features = situation.config, situation.config.features
    checkpointing = [True] if situation.profile.prefer_checkpointing else [False, True]
    if features.activation_checkpointing != "auto":
        checkpointing = [features.activation_checkpointing]
    tiling = [False, True] if features.vae_tiling == "auto" else [features.vae_tiling]
    for storage in weights:
        for recompute in checkpointing:
            for tiled in tiling:
                yield Storage(
                    method=config.method,
                    device=situation.profile.device,
                    dtype=dtype,
                    weights=storage,
                    checkpointing=recompute,
                    tiling=tiled,
                    previews=bool(config.validation.prompts),
                    random_weights=config.model.weights == "random",
                    stored=stored,
                )


def _distinct(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """One outcome for each storage and checkpointing: the one that needs least."""
    least: dict[tuple[str, bool], Outcome] = {}
    for outcome in outcomes:
        key = (outcome.storage.weights, outcome.storage.checkpointing)
        if key not in least or outcome.peak_bytes < least[key].peak_bytes:
            least[key] = outcome
    return list(least.values())
