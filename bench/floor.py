"""The least time of a LoRA step: its products at the rates that single kernels were measured at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.families.family import Family
from trainer.families.values import Shape

_LINEAR_PASSES = 2.0
"""A frozen layer's products: forward, and the gradient of its input."""
_ATTENTION_PASSES = 3.5
"""Forward has two products, backward five: it computes the probabilities once more."""
_TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Work:
    """Floating-point operations of one forward pass, in units of 1e12; a multiply-add counts two."""

    linear: float
    attention: float


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Rates of single kernels, in units of 1e12 operations a second."""

    bf16: float = 765.0
    fp8: float = 1410.0
    int8: float = 760.0
    attention: float = 546.0


H200 = Ceilings()
"""Measured on one H200 with torch 2.11 on FLUX.1-dev's shapes, November 2026; attention is cuDNN's."""


def floor_milliseconds(work: Work, precision: str, ceilings: Ceilings = H200) -> float:
    """Milliseconds of forward and backward with frozen linear layers that multiply in `precision`.

    Recomputation, pointwise work, the adapter and the optimizer count nothing. `precision` is bf16, fp8 or
    int8; a KeyError otherwise.
    """
    rate = {"bf16": ceilings.bf16, "fp8": ceilings.fp8, "int8": ceilings.int8}[precision]
    linear = _LINEAR_PASSES * work.linear / rate
    return 1e3 * (linear + _ATTENTION_PASSES * work.attention / ceilings.attention)


def count_work(family: Family, base: Path, shape: Shape) -> Work:
    """The forward pass of the full-size model, built on torch's meta device, which computes shapes only.

    A language model's attention is counted as causal over one full row.
    """
    import torch
    from accelerate import init_empty_weights
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from bench.peers import random_source
    from bench.steps import synthetic
    from trainer.engine.caching.batches import to_device

    source, config = random_source(family, base)
    model_config = source.component_config(family.trained_component)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with init_empty_weights(include_buffers=True):
            model = _built(family.model_class(source), source.component(family.trained_component))
    finally:
        torch.set_default_dtype(default)
    if family.sample_kind == "conversation":
        attention = family.attention_shape(model_config, shape)
        products = 4 * attention.batch_size * attention.heads * attention.head_width * attention.tokens**2
        weights = sum(one.weight.numel() for one in model.modules() if isinstance(one, torch.nn.Linear))
        return Work(
            linear=2 * weights * shape.batch_size * shape.text_tokens / _TERA,
            attention=model_config["num_hidden_layers"] * products / 2 / _TERA,
        )
    settings, batch, draws = synthetic(family, source, config, shape)
    moved, draw = to_device(batch, draws[0], "meta", torch.bfloat16)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        family.predict(model, moved, draw, settings)
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    linear = sum(count for op, count in counts.items() if op in ("aten.mm", "aten.addmm"))
    return Work(linear=linear / _TERA, attention=(sum(counts.values()) - linear) / _TERA)


def _built(model_class: Any, folder: Path) -> Any:
    from transformers import PreTrainedModel

    if issubclass(model_class, PreTrainedModel):
        return model_class(model_class.config_class.from_pretrained(folder))
    return model_class.from_config(model_class.load_config(folder))
