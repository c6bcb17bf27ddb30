"""The model of a run between its stages: loaded, adapted, compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.modeling.blocks.recompute import Blocks
from trainer.modeling.storage.staging import Staged


@dataclass(frozen=True, kw_only=True)
class Model:
    """The trained component with what was found in it once."""

    module: Any
    blocks: Blocks
    """The family's repeated blocks."""
    staged: Staged | None = None
    """The blocks whose weights lie elsewhere; None where all are on the device."""
