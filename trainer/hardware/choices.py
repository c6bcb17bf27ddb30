"""Floor 2: decisions that do not depend on memory: compute type, attention kernel, TF32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config.schema import RunConfig
from trainer.errors import ConfigError, HardwareError
from trainer.hardware.compatibility import BF16_CAPABILITY
from trainer.hardware.facts import Facts, KernelVerdict, version_text
from trainer.hardware.plan import Decision
from trainer.hardware.profiles import Profile


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What every choice looks at."""

    config: RunConfig
    facts: Facts
    profile: Profile
    sources: Mapping[str, str]

    @property
    def on_gpu(self) -> bool:
        """True where the run trains on a GPU."""
        return self.profile.device == "cuda"

    @property
    def tensor_cores(self) -> bool:
        """True for GPUs with bf16 and TF32 units."""
        return self.on_gpu and self.facts.gpus[0].capability >= BF16_CAPABILITY

    @property
    def gpu(self) -> str:
        """The device in words, for reasons and refusals."""
        if not self.on_gpu:
            return "a CPU"
        return f"{self.facts.gpus[0].name} (compute capability {version_text(self.facts.gpus[0].capability)})"

    def source(self, key: str) -> str:
        """Where the user wrote the value of a dotted key."""
        return self.sources.get(key, key)

    def refuse(self, key: str, what: str, remedy: str) -> HardwareError:
        """An explicit choice that cannot be honoured."""
        return HardwareError(f"{key}: {what}", where=self.source(key), remedy=remedy)


def dtype(situation: Situation) -> Decision:
    """`bf16` or `fp32`; raises HardwareError for bf16 that the GPU does not have."""
    asked, weights = situation.config.model.dtype, situation.config.features.weights
    key = "model.dtype"
    if asked == "auto" and weights in ("bf16", "fp32"):
        # the storage that the user wrote decides the compute type too: one copy of the weights, no casts
        key, asked = "features.weights", weights
    elif weights in ("bf16", "fp32") and weights != asked:
        raise ConfigError(
            f"features.weights is {weights}, but model.dtype is {asked}",
            where=situation.source("features.weights"),
            remedy="leave one of them out",
        )
    if asked == "auto":
        return _automatic_dtype(situation)
    if asked == "bf16" and situation.on_gpu and not situation.tensor_cores:
        raise situation.refuse(
            key, f"{situation.gpu} has no bf16, which needs 8.0", f"leave {key} out, or use fp32"
        )
    slow = " (slow on most CPUs)" if asked == "bf16" and not situation.on_gpu else ""
    return Decision(feature="dtype", value=asked, source=situation.source(key), reason=f"as written{slow}")


def _automatic_dtype(situation: Situation) -> Decision:
    if situation.tensor_cores:
        value, reason = "bf16", "the GPU has bf16 units"
    elif situation.on_gpu:
        value, reason = "fp32", f"{situation.gpu} has no bf16, which needs 8.0"
    else:
        value, reason = "fp32", "CPUs compute fp32 fastest"
    return Decision(feature="dtype", value=value, source="auto", reason=reason)


def tf32(situation: Situation) -> Decision:
    """`on` or `off`; raises HardwareError where it was asked for and the device has none."""
    asked = situation.config.features.tf32
    if asked == "auto":
        value = situation.tensor_cores
        reason = "for what stays in float32" if value else f"{situation.gpu} has no TF32"
        return Decision(feature="tf32", value=on_off(value), source="auto", reason=reason)
    if asked and not situation.tensor_cores:
        raise situation.refuse("features.tf32", f"{situation.gpu} has no TF32", "leave features.tf32 out")
    source = situation.source("features.tf32")
    return Decision(feature="tf32", value=on_off(asked), source=source, reason="as written")


def attention(situation: Situation, dtype: str, shape_class: str) -> Decision:
    """The attention kernel: the fastest that the probe saw working, else the profile's first safe one.

    Raises HardwareError for a kernel that was asked for and cannot run, or that the probe saw failing.
    """
    asked = situation.config.features.attention
    verdicts = {v.kernel: v for v in situation.facts.verdicts if v.shape_class == shape_class}
    measured = {name: verdicts.get(f"attention.{name}") for name in situation.profile.attention}
    if asked != "auto":
        return _explicit_attention(situation, asked, dtype, verdicts.get(f"attention.{asked}"))
    working = {name: v.milliseconds or 0.0 for name, v in measured.items() if v is not None and v.works}
    working = {name: ms for name, ms in working.items() if not _attention_obstacle(situation, name, dtype)}
    skipped = [f"{name}: {v.reason}" for name, v in measured.items() if v is not None and not v.works]
    if working:
        best = min(working, key=lambda name: working[name])
        times = ", ".join(
            f"{name} {ms:.2f} ms" for name, ms in sorted(working.items(), key=lambda item: item[1])
        )
        reason = "; ".join((f"fastest measured at {shape_class}: {times}", *skipped))
        return Decision(feature="attention", value=best, source="auto (measured)", reason=reason)
    for name in situation.profile.attention:
        obstacle = _attention_obstacle(situation, name, dtype)
        if measured[name] is not None:
            continue
        if not obstacle and name == "cudnn":
            obstacle = "not measured here (`trainer probe`), and some versions crash in its backward"
        if not obstacle:
            note = (
                "first of the profile's order; not measured here"
                if situation.on_gpu
                else "torch's only kernel on CPUs"
            )
            reason = "; ".join((note, *skipped))
            return Decision(
                feature="attention", value=name, source=f"profile {situation.profile.name}", reason=reason
            )
        skipped.append(f"{name}: {obstacle}")
    raise HardwareError(
        "no attention kernel works here: " + "; ".join(skipped), remedy="run `trainer probe` again"
    )


def _explicit_attention(
    situation: Situation, asked: str, dtype: str, verdict: KernelVerdict | None
) -> Decision:
    key = "features.attention"
    obstacle = _attention_obstacle(situation, asked, dtype)
    if obstacle:
        raise situation.refuse(key, f"{asked} cannot run here: {obstacle}", f"leave {key} out")
    if verdict is not None and not verdict.works:
        remedy = f"leave {key} out; `trainer probe` measures again"
        raise situation.refuse(key, f"the probe saw {asked} failing: {verdict.reason}", remedy)
    measured = "works here" if verdict is not None else "not measured here"
    reason = f"as written; {measured}" if asked != "native" else "as written; torch chooses the kernel itself"
    return Decision(feature="attention", value=asked, source=situation.source(key), reason=reason)


def _attention_obstacle(situation: Situation, name: str, dtype: str) -> str:
    """Why a kernel cannot run at all, whatever was measured; empty where it can."""
    if name == "native":
        return ""
    if not situation.on_gpu:
        return "" if name == "math" else "a CPU has native and math only"
    if name in ("flash", "cudnn"):
        if not situation.tensor_cores:
            return f"needs compute capability 8.0, this is {situation.gpu}"
        if dtype != "bf16":
            return f"needs bf16, the run computes in {dtype}"
    return ""


def on_off(value: bool) -> str:
    """How the plan's table writes a switch."""
    return "on" if value else "off"
