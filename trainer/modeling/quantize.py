"""Floor 4: weight-only int8 for a frozen base, by optimum-quanto."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from trainer.errors import ConfigError


def int8_replacer(high_precision: Sequence[str]) -> Callable[[str, torch.nn.Module], torch.nn.Module | None]:
    """A `Replace` for `load_streamed`: int8 with one scale a row for every linear that no pattern keeps.

    Patterns are regular expressions over whole module names.
    """
    from optimum.quanto import qint8
    from optimum.quanto.nn import QLinear

    keep = re.compile("|".join(f"(?:{pattern})" for pattern in high_precision))

    def replace(name: str, module: torch.nn.Module) -> torch.nn.Module | None:
        if keep.fullmatch(name):
            return None
        quantized = QLinear.from_module(module, weights=qint8)
        quantized.freeze()
        return quantized

    return replace


def quantized_names(model: torch.nn.Module) -> list[str]:
    """Names of the linears that are stored in int8."""
    from optimum.quanto.nn import QLinear

    return [name for name, module in model.named_modules() if isinstance(module, QLinear)]


def require_quantized(model: torch.nn.Module) -> int:
    """Number of int8 linears; a plan that says int8 and a model that has none contradict each other."""
    count = len(quantized_names(model))
    if count == 0:
        raise ConfigError("the plan asks for an int8 base, but no layer of this model was quantised")
    return count
