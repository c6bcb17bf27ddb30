"""Decisions that do not depend on memory: compute type, kernels, TF32, compiling, loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainer.config.schema import RunConfig
from trainer.errors import ConfigError, HardwareError
from trainer.machine.facts import Facts, KernelVerdict, version_text
from trainer.machine.profiles import Profile
from trainer.planning.cost.memory import Storage
from trainer.planning.cost.roofline import rates
from trainer.planning.plan import Decision
from trainer.planning.shapes.adapters import plain_path
from trainer.planning.shapes.geometry import Geometry
from trainer.planning.torch_and_driver import BF16_CAPABILITY
from trainer.ways.kernels import KERNELS, NOT_INSTALLED
from trainer.words import extras

COMPILE_SECONDS = 45
"""What compiling a model's blocks costs, about: a run that gains less stays eager.

On an H200 the first steps of two models took 38 s, and the next ones, until graphs served them, 5 to 12 s
more than later ones.
"""
MEASURE_AGAIN = "`trainer probe CONFIG` measures again"


class KernelsFailedError(HardwareError):
    """What was asked for, or every kernel that is left, was seen failing: measuring again may help."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What every choice looks at."""

    config: RunConfig
    facts: Facts
    profile: Profile
    sources: Mapping[str, str]
    environ: Mapping[str, str] = field(default_factory=dict)
    """The environment of the command."""
    disk: str = ""
    """The file system that the base model's files lie on; empty where they are not here."""
    goes_on: bool = False
    """Whether the run has begun, with its samples parted as the configuration says."""

    @property
    def unmeasured(self) -> Situation:
        """The same before any kernel was measured."""
        return replace(self, facts=replace(self.facts, verdicts=()))

    @property
    def on_gpu(self) -> bool:
        """True where the run trains on a GPU."""
        return self.profile.device == "cuda"

    @property
    def tensor_cores(self) -> bool:
        """True for GPUs with bf16 and TF32 units."""
        return self.on_gpu and self.facts.gpu.capability >= BF16_CAPABILITY

    @property
    def gpu(self) -> str:
        """The device in words, for reasons and refusals."""
        if not self.on_gpu:
            return "a CPU"
        return f"{self.facts.gpu.name} (compute capability {version_text(self.facts.gpu.capability)})"

    def source(self, key: str) -> str:
        """Where the user wrote the value of a dotted key."""
        return self.sources.get(key, key)

    def refuse(self, key: str, what: str, remedy: str) -> HardwareError:
        """An explicit choice that cannot be honoured."""
        return HardwareError(f"{key}: {what}", where=self.source(key), remedy=remedy)

    def refuse_failed(self, key: str, name: str, reason: str) -> KernelsFailedError:
        """An explicit choice that the probe saw failing."""
        what = f"{key}: the probe saw {name} failing: {reason}"
        remedy = f"leave {key} out; {MEASURE_AGAIN}"
        return KernelsFailedError(what, where=self.source(key), remedy=remedy)


def dtype(situation: Situation) -> Decision:
    """`bf16` or `fp32`; raises HardwareError for bf16 that the GPU does not have."""
    features = situation.config.features
    asked, weights = situation.config.model.dtype, features.weights
    key = "model.dtype"
    if features.compute == "bf16" and (asked in ("fp16", "fp32") or weights == "fp32"):
        other = "model.dtype" if asked in ("fp16", "fp32") else "features.weights"
        raise ConfigError(
            f"features.compute is bf16, but {other} is {asked if other == 'model.dtype' else weights}",
            where=situation.source("features.compute"),
            remedy="leave one of them out",
        )
    if asked == "auto" and features.compute == "bf16" and weights not in ("bf16", "fp32"):
        key, asked = "features.compute", "bf16"
    elif asked == "auto" and weights in ("bf16", "fp32"):
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
    if asked == "fp16":
        slow = "; the loss is scaled, and steps that overflow are skipped"
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


def attention(situation: Situation, dtype: str, shape_class: str, *, packed: bool = False) -> Decision:
    """The attention kernel: the fastest that the probe saw working, else the profile's first safe one.

    Over `packed` rows a kernel that reads where samples end comes first where blocks may be compiled: with
    others they are compiled for each row anew.

    Of cuDNN some versions crash in backward, and flash-attn's packages are built in many ways: they are taken
    where they were measured only. Raises HardwareError for a kernel that was asked for and cannot run, or
    that the probe saw failing.
    """
    asked = situation.config.features.attention
    at = (shape_class, dtype)
    verdicts = {v.kernel: v for v in situation.facts.verdicts if (v.shape_class, v.dtype) == at}
    measured = {name: verdicts.get(f"attention.{name}") for name in situation.profile.attention}
    if asked != "auto":
        return _explicit_attention(situation, asked, dtype, verdicts.get(f"attention.{asked}"))
    working = {name: v.milliseconds or 0.0 for name, v in measured.items() if v is not None and v.works}
    working = {name: ms for name, ms in working.items() if not _attention_obstacle(situation, name, dtype)}
    skipped = [
        f"{name}: {v.reason}"
        for name, v in measured.items()
        if v is not None and not v.works and v.reason != NOT_INSTALLED
    ]
    if working:
        may_compile = situation.config.features.compile is not False and not _compile_obstacle(situation)
        by_rows = [name for name in working if packed and may_compile and KERNELS[name].reads_ends]
        best = min(by_rows or working, key=lambda name: working[name])
        times = ", ".join(
            f"{name} {ms:.2f} ms" for name, ms in sorted(working.items(), key=lambda item: item[1])
        )
        first = "one call for any row; measured" if by_rows else "fastest measured"
        reason = "; ".join((f"{first} at {shape_class}: {times}", *skipped))
        return Decision(feature="attention", value=best, source="auto (measured)", reason=reason)
    unmeasured = [name for name, verdict in measured.items() if verdict is None]
    return _unmeasured_attention(situation, dtype, unmeasured, skipped)


def _unmeasured_attention(
    situation: Situation, dtype: str, names: Sequence[str], skipped: Sequence[str]
) -> Decision:
    """The first of `names` that is safe unseen; `skipped` are texts on kernels that were measured."""
    passed: dict[str, list[str]] = {}
    best = None
    for name in names:
        obstacle = _attention_obstacle(situation, name, dtype)
        if not obstacle and not KERNELS[name].safe:
            obstacle = "not measured here (`trainer probe CONFIG`)"
        if not obstacle:
            best = name
            break
        passed.setdefault(obstacle, []).append(name)
    texts = [*skipped, *(f"{', '.join(group)}: {why}" for why, group in passed.items())]
    if best is None:
        what = "no attention kernel works here: " + "; ".join(texts)
        remedy = f"{MEASURE_AGAIN}; features.attention: native lets torch choose, whatever was measured"
        raise KernelsFailedError(what, remedy=remedy)
    note = "first of the profile's order; not measured here"
    if not situation.on_gpu:
        note = "torch's only kernel on CPUs"
    source = f"profile {situation.profile.name}"
    return Decision(feature="attention", value=best, source=source, reason="; ".join((note, *texts)))


def _explicit_attention(
    situation: Situation, asked: str, dtype: str, verdict: KernelVerdict | None
) -> Decision:
    key = "features.attention"
    obstacle = _attention_obstacle(situation, asked, dtype)
    if obstacle:
        raise situation.refuse(key, f"{asked} cannot run here: {obstacle}", f"leave {key} out")
    kernel = KERNELS[asked]
    absent = verdict is None and kernel.package not in situation.facts.packages
    if kernel.package and (absent or (verdict is not None and verdict.reason == NOT_INSTALLED)):
        what = f"{asked} cannot run here: {kernel.package} is not installed"
        raise situation.refuse(
            key, what, f"{kernel.build or extras.remedy(kernel.extra)}; or leave {key} out"
        )
    if verdict is not None and not verdict.works:
        raise situation.refuse_failed(key, asked, verdict.reason)
    measured = "works here" if verdict is not None else "not measured here"
    reason = f"as written; {measured}" if asked != "native" else "as written; torch chooses the kernel itself"
    return Decision(feature="attention", value=asked, source=situation.source(key), reason=reason)


def _attention_obstacle(situation: Situation, name: str, dtype: str) -> str:
    """Why a kernel cannot run at all, whatever was measured; empty where it can."""
    kernel = KERNELS[name]
    if not situation.on_gpu:
        others = " and ".join(one.name for one in KERNELS.values() if one.on_cpu)
        return "" if kernel.on_cpu else f"a CPU has {others} only"
    capability, only = situation.facts.gpu.capability, kernel.only_capability
    if capability < kernel.least_capability:
        return f"needs compute capability {version_text(kernel.least_capability)}, this is {situation.gpu}"
    if only not in (None, capability):
        return f"is for compute capability {version_text(only)}, this is {situation.gpu}"
    return f"needs bf16, the run computes in {dtype}" if kernel.half and dtype == "fp32" else ""


@dataclass(frozen=True, kw_only=True)
class Fp8Verdict:
    """What the probe saw of products in FP8 at the run's shape."""

    faster: bool = False
    """It works, and takes less time than bf16."""
    fails: bool = False
    reason: str


def fp8_verdict(situation: Situation, geometry: Geometry) -> Fp8Verdict:
    """The probe's verdict on products in FP8; neither faster nor failing where there is none."""
    found = {
        row.kernel: row
        for row in situation.facts.verdicts
        if row.shape_class == geometry.matmul_shape_class and geometry.matmul_shape_class
    }
    fp8, bf16 = found.get("matmul.fp8"), found.get("matmul.bf16")
    if fp8 is not None and not fp8.works:
        return Fp8Verdict(fails=True, reason=fp8.reason)
    if fp8 is None or bf16 is None or fp8.milliseconds is None or bf16.milliseconds is None:
        return Fp8Verdict(reason="not measured here (`trainer probe CONFIG`)")
    faster = fp8.milliseconds < bf16.milliseconds
    reason = f"measured at {fp8.shape_class}: {fp8.milliseconds:.2f} ms, bf16 {bf16.milliseconds:.2f} ms"
    return Fp8Verdict(faster=faster, reason=reason)


def compiling(situation: Situation, gain_milliseconds: float, micro_batches: int) -> Decision:
    """Whether blocks are compiled, from the predicted gain a micro-batch; `auto` never does on a CPU.

    Raises HardwareError where it, or what needs it, was asked for and cannot be had.
    """
    features, feature = situation.config.features, "compile"
    obstacle = _compile_obstacle(situation)
    share = features.activation_budget
    if features.compile != "auto":
        if features.compile and obstacle:
            raise situation.refuse("features.compile", obstacle, _compile_remedy(situation))
        source = situation.source("features.compile")
        return Decision(feature=feature, value=on_off(features.compile), source=source, reason="as written")
    if share not in ("auto", 1.0):
        key = "features.activation_budget"
        if obstacle:
            raise situation.refuse(key, f"only compiled blocks have one: {obstacle}", f"leave {key} out")
        return Decision(feature=feature, value="on", source="auto", reason=f"{key} needs it")
    seconds = gain_milliseconds * micro_batches / 1000
    known = rates(situation.facts.gpu) if situation.on_gpu else None
    how = "predicted" if known else "guessed: this GPU's rates are not known"
    what = "micro-batches" if situation.config.train.train_batch_size == 1 else "batches"
    gain = f"{_whole(micro_batches)} {what} would gain {_whole(seconds)} s ({how})"
    cost = f"compiling costs about {COMPILE_SECONDS} s"
    if plain_path(situation.config):
        value, reason = False, obstacle
    elif not situation.on_gpu:
        value, reason = False, "for GPUs; true compiles here too"
    elif obstacle:
        value, reason = False, obstacle
    else:
        value, reason = seconds >= COMPILE_SECONDS, f"{gain}, {cost}"
    return Decision(feature=feature, value=on_off(value), source="auto", reason=reason)


def _compile_obstacle(situation: Situation) -> str:
    """Why blocks are not compiled here; empty where they can be."""
    option = plain_path(situation.config)
    if option:
        return f"{option} keeps to the plain path: compiled blocks are for plain LoRA in bf16 and fp32"
    if situation.on_gpu and "triton" not in situation.facts.packages:
        return "it needs triton, which is not installed"
    return "" if situation.facts.c_compiler else "it needs a C compiler (gcc or clang), and there is none"


def _compile_remedy(situation: Situation) -> str:
    option = plain_path(situation.config)
    return f"leave features.compile or {option.partition(':')[0]} out" if option else _INSTALL_IT


_INSTALL_IT = "install it, or leave features.compile out"
NEEDS_COMPILED = "only with compiled blocks"


TIGHT = 0.96
"""Share of an imposed budget beyond which memory between tensors decides whether a run fits."""


def cuda_graphs(
    situation: Situation, geometry: Geometry, storage: Storage, *, filled: float = 0.0
) -> Decision:
    """Whether a micro-batch is replayed as one CUDA graph; raises HardwareError where that cannot be had.

    `filled` is the share of an imposed budget that training is predicted to fill.
    """
    asked, feature, key = situation.config.features.cuda_graphs, "cuda_graphs", "features.cuda_graphs"
    obstacle = _graphs_obstacle(situation, geometry, storage)
    if asked != "auto":
        if asked and obstacle:
            remedy = f"leave {key} out"
            if obstacle == NEEDS_COMPILED:
                remedy += ", or write features.compile: true"
            raise situation.refuse(key, obstacle, remedy)
        source = situation.source(key)
        return Decision(feature=feature, value=on_off(asked), source=source, reason="as written")
    if filled > TIGHT and not obstacle:
        obstacle = (
            f"{filled:.0%} of the budget is filled, and what graphs hold cannot be given back in pieces"
        )
    reason = obstacle or "thousands of launches become one: the host's speed does not matter"
    return Decision(feature=feature, value=on_off(not obstacle), source="auto", reason=reason)


def _graphs_obstacle(situation: Situation, geometry: Geometry, storage: Storage) -> str:
    """Why micro-batches cannot be CUDA graphs; empty where they can."""
    if not situation.on_gpu:
        return "a CPU has no CUDA graphs"
    if geometry.packed:
        return "a graph is of one shape, and packed rows differ from one to the next"
    if storage.method != "lora" or storage.dtype != "bf16":
        return "only for a LoRA in bf16, whose gradients are summed inside the graph"
    if storage.swapped:
        return "a graph reads weights where they were, and blocks wait in host memory"
    return "" if storage.compile else NEEDS_COMPILED


def _whole(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")


def on_off(value: bool) -> str:
    """How the plan's table writes a switch."""
    return "on" if value else "off"
