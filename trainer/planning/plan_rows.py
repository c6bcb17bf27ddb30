"""Rows of a plan that follow from few of its decisions, and what it warns of."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.judging.rules import keeps_best
from trainer.config.schema import RunConfig
from trainer.machine.host import WSL_SPILLS
from trainer.machine.profiles import Profile
from trainer.planning.choose import fit, switches
from trainer.planning.choose.switches import Situation
from trainer.planning.cost import memory
from trainer.planning.plan import Decision
from trainer.planning.shapes.geometry import Geometry
from trainer.words.sizes import gib


def disk(config: RunConfig, chosen: fit.Outcome, geometry: Geometry) -> tuple[str, int]:
    """Checkpoints that exist at one time, in words, and the bytes of everything."""
    steps, every = config.train.max_train_steps, config.checkpoint.checkpointing_steps
    saved = steps // every
    # the last step is saved too, but not by a full fine-tune that was told to write no checkpoints
    if steps % every and (config.method == "lora" or saved):
        saved += 1
    count = min(config.checkpoint.checkpoints_total_limit + 1, saved)
    # the best one's, and what is to take its place
    copies = 3 if keeps_best(config) else 1
    size = memory.disk_bytes(chosen.storage, geometry, checkpoints=count, copies=copies)
    return f"{count} checkpoint{'s' if count != 1 else ''}", size


def policies(profile: Profile) -> Iterator[Decision]:
    """What the profile fixes: pinning, and its notes."""
    source, notes = profile.memory_source, dict(profile.notes)
    pinned = "faster copies to the GPU" if profile.pin_memory else "there is no GPU to copy to"
    yield row("pin_memory", switches.on_off(profile.pin_memory), source, notes.pop("pin_memory", pinned))
    for feature, reason in notes.items():
        yield row(feature, "off", source, reason)


def warnings(situation: Situation, host_bytes: int) -> Iterator[str]:
    """What works, but deserves to be known."""
    facts, profile = situation.facts, situation.profile
    if host_bytes > facts.memory.available_bytes:
        available = gib(facts.memory.available_bytes)
        yield f"the training process needs {gib(host_bytes)} of host memory, {available} are available"
    if facts.wsl and situation.on_gpu:
        yield WSL_SPILLS
    if len(facts.gpus) > 1 and situation.on_gpu:
        yield f"{len(facts.gpus)} GPUs are visible, one process trains on the first ({facts.gpu.name})"
    if profile.device == "cpu" and facts.gpus:
        yield f"{facts.gpu.name} is not used: TRAINER_PROFILE is cpu"


def parameters(geometry: Geometry) -> str:
    """The trained component's size."""
    count = memory.parameters(geometry, "trained")
    return f"{count / 1e9:.1f} B parameters" if count >= 10**8 else f"{count / 1e6:.2f} M parameters"


def row(feature: str, value: str, source: str, reason: str) -> Decision:
    return Decision(feature=feature, value=value, source=source, reason=reason)
