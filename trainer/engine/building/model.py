"""The model of a run between its stages: loaded, adapted, compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.modeling.blocks.recompute import Blocks
from trainer.modeling.storage.staging import Staged

if TYPE_CHECKING:
    from trainer.modeling.storage.trained_rows import Root


@dataclass(frozen=True, kw_only=True)
class Model:
    """The trained component with what was found in it once."""

    module: Any
    blocks: Blocks
    """The family's repeated blocks."""
    staged: Staged | None = None
    """The blocks whose weights lie elsewhere; None where all are on the device."""
    root: Root | None = None
    """The way of all ranks through the model, where its weights lie in rows; None where they are whole."""
