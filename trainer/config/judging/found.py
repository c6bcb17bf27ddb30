"""What a rule reads of a configuration, and what it gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainer.config.schema import RunConfig
from trainer.config.tree import by_user

Found = Iterator[tuple[str, str, str]]
"""Where, what and remedy of each problem."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a check may look at."""

    config: RunConfig
    sources: Mapping[str, str]
    environ: Mapping[str, str]
    lora_presets: Mapping[str, tuple[str, ...]]
    """Names of LoRA target presets by family; a family that is not in it is not checked."""

    def source(self, key: str) -> str:
        """Where `key` was written; the family or `default` if nobody wrote it."""
        return self.sources.get(key, "default")

    def written(self, key: str) -> bool:
        """True if the user wrote `key`, in whatever layer."""
        return by_user(self.source(key))

    def blame(self, *keys: str) -> str:
        """Source of the first of `keys` that the user wrote: the place to change."""
        return next((self.source(key) for key in keys if self.written(key)), self.source(keys[0]))
