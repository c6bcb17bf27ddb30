"""The model of a run between its stages: loaded, adapted, compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.modeling.blocks.recompute import Blocks
from trainer.modeling.storage.swap import Swapped


@dataclass(frozen=True, kw_only=True)
class Model:
    """The trained component with what was found in it once."""

    module: Any
    blocks: Blocks
    """The family's repeated blocks."""
    host_blocks: Swapped | None = None
    """The blocks that wait in host memory; None where all are on the device."""
