"""The situation that every decision looks at, with words for values that were written or cannot be had."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.config.hosts import ONE, Hosts
from trainer.config.judging.rule import Context
from trainer.config.schema import RunConfig
from trainer.errors import HardwareError
from trainer.machine.facts import Facts, Gpu, version_text
from trainer.machine.profiles import Profile
from trainer.planning.plan import Decision
from trainer.planning.shapes.geometry import Geometry
from trainer.planning.torch_and_driver import BF16_CAPABILITY
from trainer.ways.storages import VALUE_BYTES

GeometryOf = Callable[[RunConfig, str], Geometry]
"""Geometry of a configuration in a compute type."""
MEASURE_AGAIN = "`trainer probe CONFIG` measures again"


class KernelsFailedError(HardwareError):
    """The kernel that was asked for, or every one that is left, was seen failing: measure again."""


@dataclass(frozen=True, kw_only=True)
class Situation(Context):
    """A configuration on a machine: the input of every choice."""

    facts: Facts
    """The machine with no GPUs but those that the run may take, all of one kind."""
    profile: Profile
    sized: GeometryOf
    disk: str = ""
    """The file system that the base model's files lie on; empty where they are not here."""
    goes_on: bool = False
    """Whether the run has begun, with its samples parted as the configuration says."""
    ranks: int = 1
    """Processes that share the micro-batches of a step, on all hosts."""
    hosts: Hosts = ONE
    """The machines that train together; each has as many of the processes."""
    interface: str = ""
    """The network interface by which this host reaches the others; empty for one host, and where it is not
    known."""
    devices: tuple[int, ...] = ()
    """Places of `facts.gpus` among the visible ones; empty on a CPU, and for the first ones."""
    others: tuple[Gpu, ...] = ()
    """Visible GPUs that the run cannot take beside these: of another kind, or not the profile's."""
    in_use: tuple[tuple[int, Gpu], ...] = ()
    """Visible GPUs that are left out because others work on them, with their places."""

    @property
    def ranks_here(self) -> int:
        """Processes on this machine."""
        return self.ranks // self.hosts.count

    @functools.cached_property
    def geometry(self) -> Geometry:
        """Sizes of the configuration's run in its type."""
        return self.sized(self.config, self.dtype)

    @property
    def dtype(self) -> str:
        """`bf16`, `fp16` or `fp32`: the run's type. Raises as `type_row`."""
        return self.type_row.value

    @functools.cached_property
    def type_row(self) -> Decision:
        """The run's type; raises HardwareError for bf16 that the GPU does not have."""
        config, key = self.config, "model.dtype"
        asked: str = config.model.dtype
        lacking = f"{self.gpu} has no bf16, which needs {version_text(BF16_CAPABILITY)}"
        if asked == "auto" and config.features.weights in VALUE_BYTES:
            # the storage that the user wrote decides the compute type too: one copy of the weights, no casts
            key, asked = "features.weights", config.features.weights
        elif asked == "auto" and config.features.compute == "bf16":
            key, asked = "features.compute", "bf16"
        if asked == "auto":
            reason = lacking if self.on_gpu else "CPUs compute fp32 fastest"
            value, reason = ("bf16", "the GPU has bf16 units") if self.tensor_cores else ("fp32", reason)
            return Decision("dtype", value, "auto", reason)
        if asked == "bf16" and self.on_gpu and not self.tensor_cores:
            raise self.refuse(key, lacking, f"leave {key} out, or use fp32")
        slow = " (slow on most CPUs)" if asked == "bf16" and not self.on_gpu else ""
        if asked == "fp16":
            slow = "; the loss is scaled, and steps that overflow are skipped"
        return Decision("dtype", asked, self.source(key), f"as written{slow}")

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

    def lacks(self, package: str) -> str:
        """The package that something needs, where it is not installed; else, and for none, empty."""
        return "" if package in self.facts.packages else package

    def source(self, key: str) -> str:
        """Place where a dotted key's value was written; the key itself where that is not known."""
        return self.sources.get(key, key)

    def asked(self, key: str) -> Any:
        """The configuration's value of a dotted key."""
        return functools.reduce(lambda found, name: vars(found)[name], key.split("."), self.config)

    def decide(self, key: str, value: str, reason: str, *, written: str = "as written") -> Decision:
        """The row of a value that `key` may ask for: `written` where it does, else by itself for `reason`."""
        feature = key.rpartition(".")[2]
        if self.asked(key) == "auto":
            return Decision(feature, value, "auto", reason)
        return Decision(feature, value, self.source(key), written)

    def refuse(self, key: str, what: str, remedy: str = "") -> HardwareError:
        """An explicit choice that cannot be honoured."""
        return HardwareError(f"{key}: {what}", where=self.source(key), remedy=remedy or f"leave {key} out")

    def refuse_failed(self, key: str, name: str, reason: str) -> KernelsFailedError:
        """An explicit choice that the probe saw failing."""
        what = f"{key}: the probe saw {name} failing: {reason}"
        remedy = f"leave {key} out; {MEASURE_AGAIN}"
        return KernelsFailedError(what, where=self.source(key), remedy=remedy)
