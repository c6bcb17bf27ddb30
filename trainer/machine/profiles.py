"""Policy as data. A profile orders what `auto` tries and sets budgets; only `resolve` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trainer.errors import ConfigError, HardwareError
from trainer.machine.facts import Facts, Gpu, version_text
from trainer.words.near import did_you_mean
from trainer.words.sizes import GIB

ON_PURPOSE = "TRAINER_PROFILE=cpu trains on the CPU on purpose"


@dataclass(frozen=True, kw_only=True)
class Match:
    """The GPUs that a profile is for; None means any."""

    capabilities: tuple[tuple[int, int], ...] | None = None
    integrated: bool | None = None
    memory_gib: tuple[float, float] | None = None
    """Smallest and largest total memory."""

    def contradiction(self, gpu: Gpu) -> str:
        """Why the profile is not for this GPU; empty when it is."""
        if self.capabilities is not None and gpu.capability not in self.capabilities:
            wanted = " or ".join(map(version_text, self.capabilities))
            return f"it is for compute capability {wanted}, this GPU has {version_text(gpu.capability)}"
        if self.integrated is not None and gpu.integrated != self.integrated:
            return f"it is for {_memory_kind(self.integrated)}, this GPU has {_memory_kind(gpu.integrated)}"
        gib = gpu.total_memory_bytes / GIB
        if self.memory_gib is not None and not self.memory_gib[0] <= gib <= self.memory_gib[1]:
            low, high = self.memory_gib
            return f"it is for {low:g} to {high:g} GiB of GPU memory, this GPU has {gib:.1f} GiB"
        return ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of machine and what suits it."""

    name: str
    title: str
    device: str
    """`cuda` or `cpu`."""
    match: Match
    budget_share: float
    """Share of the device's total memory that a run may fill."""
    headroom_bytes: int | None
    """Bytes of MemAvailable that must stay free on unified memory; None for memory of the GPU's own."""
    attention: tuple[str, ...]
    """Kernels in the order in which `auto` prefers them while none was measured."""
    pin_memory: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the training process; `OMP_*` only where the user's own environment has no value."""
    notes: tuple[tuple[str, str], ...] = ()
    """(feature, why) of policies that are fixed for this machine."""
    by_facts: bool = False
    """Budget, headroom, pinning, allocator's settings and notes are those of unified memory, because the GPU
    has it, and not this profile's own."""

    @property
    def memory_source(self) -> str:
        """Source of budget, headroom, pinning and the allocator's settings."""
        return "facts" if self.by_facts else f"profile {self.name}"


_ANY_GPU = Profile(
    name="generic-cuda",
    title="any other CUDA GPU",
    device="cuda",
    match=Match(),
    budget_share=0.93,
    headroom_bytes=None,
    attention=(
        "flash", "cudnn", "cudnn_strided", "flash_attn_2", "flash_attn_3", "flash_attn_4", "efficient",
        "math",
    ),
    pin_memory=True,
    environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
)  # fmt: skip
_UNIFIED = replace(
    _ANY_GPU,
    name="dgx-spark",
    title="DGX Spark (GB10): one memory for CPU and GPU",
    match=Match(capabilities=((12, 1),), integrated=True),
    # the allocator is capped at the same share: beyond it the whole host can hang without a CUDA error
    budget_share=0.75,
    headroom_bytes=20 * GIB,
    pin_memory=False,
    environment={"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.75"},
    notes=(
        ("pin_memory", "pinned buffers come out of the memory that the GPU uses"),
        ("offload", "CPU and GPU share one memory: moving weights frees nothing"),
    ),
)
_TABLE: tuple[Profile, ...] = (
    _UNIFIED,
    replace(
        _ANY_GPU,
        name="rtx-4090",
        title="RTX 4090 (24 GB)",
        match=Match(capabilities=((8, 9),), integrated=False, memory_gib=(23.0, 25.0)),
        # a desktop on the same card takes up to 1 GiB
        budget_share=0.95,
    ),
    replace(
        _ANY_GPU,
        name="hopper-fp8",
        title="Hopper (H100, H200, GH200)",
        match=Match(capabilities=((9, 0),)),
        budget_share=0.95,
    ),
    _ANY_GPU,
    replace(
        _ANY_GPU,
        name="cpu",
        title="training on the CPU",
        device="cpu",
        budget_share=1.0,
        headroom_bytes=2 * GIB,
        attention=("native",),
        pin_memory=False,
        # waiting threads sleep: spinning, OpenMP's default, slows steps 5 times beside another program
        environment={"OMP_WAIT_POLICY": "PASSIVE"},
    ),
)
PROFILES: Mapping[str, Profile] = {profile.name: profile for profile in _TABLE}


@dataclass(frozen=True, kw_only=True)
class Selected:
    """A profile for the GPUs of one kind."""

    facts: Facts
    """The machine as if only the GPUs of this kind were visible; as it is for the profile of the CPU."""
    places: tuple[int, ...]
    """Places of these GPUs among the visible ones; empty for the CPU."""
    profile: Profile
    reason: str


def select(facts: Facts, requested: str = "auto") -> tuple[Profile, str]:
    """The profile and why, of the first kind of GPU that it may be for. Raises as `select_each`."""
    first = select_each(facts, requested)[0]
    return first.profile, first.reason


def select_each(facts: Facts, requested: str = "auto") -> tuple[Selected, ...]:
    """For each kind of GPU the first profile whose match fits it, or the requested one where it fits.

    Raises ConfigError for an unknown name, and HardwareError for a requested profile that contradicts every
    kind and for `auto` on a machine whose GPUs cannot be used: training never moves to the CPU silently.
    """
    if requested != "auto" and requested not in PROFILES:
        known = ("auto", *PROFILES)
        raise ConfigError(
            f'there is no profile "{requested}"',
            where="TRAINER_PROFILE",
            remedy=f"{did_you_mean(requested, known)}known: {', '.join(known)}",
        )
    if requested == "cpu":
        return (_on_cpu(facts, f"requested; {PROFILES['cpu'].title}"),)
    if not facts.gpus:
        if requested != "auto":
            raise _no_gpu(facts, f"profile {requested} needs a GPU, and none is visible")
        if facts.gpu_problem:
            raise _no_gpu(facts, "an NVIDIA driver is loaded, but no GPU is visible")
        return (_on_cpu(facts, "no GPU and no NVIDIA driver on this machine"),)
    found, refused = list[Selected](), list[HardwareError]()
    for places in facts.kinds:
        here = facts.on(places)
        try:
            profile, reason = _automatic(here.gpu) if requested == "auto" else _requested(here.gpu, requested)
        except HardwareError as error:
            refused.append(error)
            continue
        found.append(Selected(facts=here, places=places, profile=profile, reason=reason))
    if not found:
        raise refused[0]
    return tuple(found)


def _on_cpu(facts: Facts, reason: str) -> Selected:
    return Selected(facts=facts, places=(), profile=PROFILES["cpu"], reason=reason)


def _requested(gpu: Gpu, requested: str) -> tuple[Profile, str]:
    profile = PROFILES[requested]
    problem = profile.match.contradiction(gpu)
    if problem:
        raise HardwareError(
            f"profile {profile.name} contradicts this machine ({gpu.name}): {problem}",
            where=f"TRAINER_PROFILE={profile.name}",
            remedy=f"use TRAINER_PROFILE={_automatic(gpu)[0].name}, or auto",
        )
    return _guarded(profile, gpu, f"requested; {profile.title}")


def _guarded(profile: Profile, gpu: Gpu, reason: str) -> tuple[Profile, str]:
    """The profile with the guards of unified memory where the GPU has it, whatever the profile is called."""
    if not gpu.integrated or profile.headroom_bytes is not None:
        return profile, reason
    guarded = replace(_UNIFIED, name=profile.name, title=profile.title, match=profile.match, by_facts=True)
    return guarded, f"{reason}; its memory is guarded as that of {_UNIFIED.name}: it is shared with the CPU"


def _automatic(gpu: Gpu) -> tuple[Profile, str]:
    fitting = next(p for p in _TABLE if p.device == "cuda" and not p.match.contradiction(gpu))
    memory = f"{gpu.total_memory_bytes / GIB:.1f} GiB, {_memory_kind(gpu.integrated)}"
    return _guarded(fitting, gpu, f"{gpu.name}: compute capability {version_text(gpu.capability)}, {memory}")


def _no_gpu(facts: Facts, what: str) -> HardwareError:
    detail = f" ({facts.gpu_problem})" if facts.gpu_problem else ""
    return HardwareError(
        what + detail,
        where="TRAINER_PROFILE",
        remedy="give the container its GPUs (docker run --gpus all; the compose file of your hardware; in"
        " Kubernetes: resources.limits with nvidia.com/gpu: 1) and leave CUDA_VISIBLE_DEVICES unset or set to"
        f" indices; {ON_PURPOSE}",
    )


def _memory_kind(integrated: bool) -> str:
    return "memory shared with the CPU" if integrated else "memory of its own"
